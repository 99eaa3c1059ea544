"""Images: rendered Dockerfiles, builds by content, and what an image says of itself."""
