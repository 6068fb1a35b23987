"""Collectors: each reads one source and writes new rows to the staging folder of a dataset.

A package or module per source: ``prometheus`` (backfill), ``remote_write``, ``openmetrics`` (dumps), ``exporters``,
``nvml``, ``kernel_log``, ``gpud``, ``slurm``, ``kubernetes``, ``tickets``, ``diagnostics``. ``series`` converts
Prometheus series to rows, ``scraping`` is the scrape loop, ``outbox`` stages rows and positions, and ``pushing`` sends
rows staged on a node to ``remote_write``. ``predrain collect`` starts them.
"""
