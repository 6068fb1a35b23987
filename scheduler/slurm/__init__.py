"""Slurm as a scheduler: nodes and jobs come in by its commands or slurmrestd, marks go out as reason, extra and weight.

Start with ``scheduler``, the adapter. ``marks`` decides what an action writes and what we remember on a node;
``commands`` and ``rest`` are the two ways to Slurm behind ``port``;
``workloads`` are the jobs, and where else each could run; ``folder`` keeps what Slurm has no place for.
"""
