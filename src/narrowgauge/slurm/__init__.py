"""Runs on a Slurm cluster: what is asked of it, what it answers, and what runs on its nodes."""
