"""`narrowgauge new`: an experiment of one's own, with claims, that runs at once."""
