"""Kubernetes collector.

Lists and then watches nodes, events and pods, and stages drains, repairs and node faults as events, pods with GPUs as
jobs, and node locations as inventory rows.

Start with ``collector``, which also parses events. ``nodes`` and ``jobs`` track objects, ``rules`` classifies taints,
conditions and events. ``discovery`` finds the exporters behind a service.

The scheduler uses ``nodes`` and ``jobs`` too, so that both packages agree on GPUs, jobs and cordons.
"""
