"""Collects from a Kubernetes API server.

In: nodes, events and pods, listed once and then watched. Out: drains, repairs and faults of nodes as events, pods with
GPUs as jobs, locations of nodes as inventory rows, all in the staging folder of a dataset.

Start with ``collector``, which also reads events. ``nodes`` and ``jobs`` track objects, ``rules`` classifies what they
report. ``discovery`` finds the exporters behind a service.

The scheduler reads nodes and pods through ``nodes`` and ``jobs``, so both rooms agree on GPUs, jobs and cordons.
"""
