"""What starts a Job: `docker` and `native`. Import the one you need: the docker SDK is slow."""
