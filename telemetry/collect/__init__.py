"""Collectors: each reads one source of a running fleet and writes what is new to the staging folder of a dataset.

One folder or module a source: ``prometheus`` (backfill), ``remote_write``, ``openmetrics`` (dumps), ``exporters``,
``nvml``, ``kernel_log``, ``gpud``, ``slurm``, ``kubernetes``, ``tickets``, ``diagnostics``. ``series`` reads
Prometheus series into rows; ``staging`` hands rows to the staging folder; ``pushing`` sends what is staged on
a node to ``remote_write``. ``predrain collect`` starts them.
"""
