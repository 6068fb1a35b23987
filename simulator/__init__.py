"""Simulator of a fleet that ages and fails, for demos, tests and benchmarks.

Start with ``simulate``, which writes a dataset. ``run`` simulates a fleet with the ``parameters`` of one of the
``scenarios``: ``fleet`` builds the nodes, ``hazards`` defines the transition rates between hidden states, ``lives``
samples each GPU's degradations and failures, ``workload`` schedules jobs and exporter gaps, ``records`` and ``samples``
generate the telemetry, and ``risk`` computes the true risk. Only ``predrain``, tests and benchmarks import this room.
"""
