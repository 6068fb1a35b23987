"""Evacuation of nodes with a drain marker: checkpoint requests, evictions, and a diagnostic on the empty node.

Only :attr:`scheduler.ports.workloads.Workload.immovable` decides which workloads may be moved. Start with ``engine``,
which runs one round. ``drainer`` requests checkpoints and evicts, ``diagnostics`` tests empty nodes, and ``progress``
is stored in the scheduler, so that a new leader continues.
"""
