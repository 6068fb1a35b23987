"""Identities of nodes and GPUs: the only place that decides whether two names refer to the same node or GPU.

``nodes``: node names; ``devices``: UUIDs, serial numbers and PCI addresses of GPUs; ``node_labels``: the label that has
the node's name; ``placeholders.csv``: values that identify nothing. All joins and lookups by name use these modules.
"""
