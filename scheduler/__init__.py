"""Scheduler room: the controller that acts on a cluster, its ledger, and the scheduler adapters.

It imports ``foundation``, ``policy``, and from ``telemetry`` node names, the event schema and the Kubernetes rules. It
installs without the ML dependencies.
"""
