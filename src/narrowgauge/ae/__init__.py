"""Artifact evaluation: what its chairs ask for, as checks of a checkout and its results."""
