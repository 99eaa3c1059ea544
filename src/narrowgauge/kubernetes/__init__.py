"""Runs as Kubernetes Jobs: their manifests, and how they are handed to a cluster."""
