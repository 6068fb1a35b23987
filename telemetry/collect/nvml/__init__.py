"""NVML collector for nodes without an exporter.

``collector`` stages the readings that ``node_reader`` gets from ``child``, a process that reads each GPU and caches
unsupported queries for an hour; ``library`` has the table of queries and the binding.
"""
