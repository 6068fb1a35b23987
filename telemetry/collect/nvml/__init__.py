"""Telemetry of a node without an exporter, read from the NVIDIA driver itself.

``collector`` stages what ``node_reader`` gets from ``child``, the process that reads each GPU and remembers for an hour
what it does not support; ``library`` holds the table of queries and the binding.
"""
