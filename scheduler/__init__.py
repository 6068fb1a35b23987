"""Scheduler room: the controller that acts on a cluster, its ledger, and the adapters to schedulers.

Imports the policy, and of telemetry the schema of events, the Kubernetes client and Slurm runner of its collectors, and
what every room shares (errors, HTTP, atomic writes). It installs without the learners.
"""
