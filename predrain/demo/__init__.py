"""A live demo on one machine: a simulated cluster with the real scoring, controller, service and pages.

Start with ``world``, which simulates the fleet and runs its clock. ``cluster`` has the in-memory scheduler and
workloads under the real controller; tests compare the replay of ``evaluation.value`` with it.
"""
