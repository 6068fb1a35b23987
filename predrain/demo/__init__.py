"""A small live world on one machine: a simulated cluster under the real scoring, controller, service and pages.

Start with ``world``, which makes the fleet and lets its clock run. ``cluster`` is the scheduler and the workloads in
memory under the real controller; benchmarks hold the replay of ``evaluation.value`` against it.
"""
