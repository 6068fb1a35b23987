"""Kubernetes as a scheduler: marks as labels, annotations and taints; state, switches and lease as its objects."""
