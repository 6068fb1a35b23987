"""Simulator room: a fleet that ages and fails, for demos, tests and benchmarks.

Start with ``simulate``, which writes a dataset of what ``run`` simulates by the ``parameters`` of one of the
``scenarios``: ``fleet`` places nodes, ``hazards`` has the
rates between hidden states, ``lives`` draws each GPU's degradations and failures by them, ``records`` and ``samples``
make telemetry of that. Imports ``telemetry``'s schema and store only; nothing but ``predrain``, tests and benchmarks
imports it.
"""
