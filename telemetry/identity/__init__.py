"""Identities of nodes and GPUs: the one place that decides whether two names mean the same thing.

``nodes``: names of nodes; ``devices``: UUIDs, serial numbers and PCI addresses of GPUs; ``placeholders.csv``: values
that identify nothing. Every join and look-up by name uses these; no other module compares names of nodes or GPUs.
"""
