"""Scheduler room: the controller that acts on a cluster, its ledger, and the adapters to schedulers.

Imports the policy, and of telemetry the schema of events and what every room shares (errors, atomic writes). It
installs without the learners.
"""
