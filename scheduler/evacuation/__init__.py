"""From a drain mark to an empty, tested node: marked nodes come in, checkpoint requests, evictions and results go out.

What may be moved is decided in one place, :attr:`scheduler.ports.workloads.Workload.immovable`. Start with ``engine``:
one round. ``drainer`` asks and evicts, ``diagnostics`` tests what is empty, ``progress`` is kept
in the scheduler so that another leader continues.
"""
