"""The Slurm adapter: reads nodes and jobs by commands or slurmrestd, and writes markers as reason, extra and weight.

Start with ``scheduler``, the adapter. ``marks`` defines what an action writes to a node and records there. ``commands``
and ``rest`` are the two transports behind ``port``. ``workloads`` maps jobs and their placement; ``folder`` stores the
state for which Slurm has no place.
"""
