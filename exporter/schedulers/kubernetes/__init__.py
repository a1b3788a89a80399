"""Kubernetes on a node: which pod holds which GPU."""
