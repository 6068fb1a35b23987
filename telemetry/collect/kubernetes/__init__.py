"""Collects from a Kubernetes API server, and holds the client that the scheduler uses too.

In: nodes, events and pods, listed once and then watched. Out: drains, repairs and trouble of nodes as events, pods with
GPUs as jobs, node places as inventory rows, all in the landing folder of a dataset.

Start with ``collector``. ``api`` is the port to a server and its errors, ``client`` the real connection, ``watching``
keeps up with one kind of object. ``node_view``, ``node_tracker``, ``events`` and ``jobs`` make rows of objects by
``rules``. ``discovery`` finds exporters behind a service.

The scheduler reads through ``api``, ``client``, ``rules``, ``node_view`` and ``jobs``: both must mean the same by a
GPU, a job and a cordon.
"""
