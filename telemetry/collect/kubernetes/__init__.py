"""Collects from a Kubernetes API server, and holds the client that the scheduler uses too.

In: nodes, events and pods, listed once and then watched. Out: drains, repairs and trouble of nodes as events, pods with
GPUs as jobs, node places as inventory rows, all in the landing folder of a dataset.

Start with ``collector``. ``client`` is the connection, ``api`` its answers and errors, ``watching`` keeps up with one
kind of object; ``nodes``, ``events`` and ``jobs`` track what is known of each by ``rules``. ``discovery`` finds
exporters behind a service.

The scheduler reads through ``client``, ``rules``, ``nodes`` and ``jobs``: both must mean the same by a GPU, a job and a
cordon.
"""
