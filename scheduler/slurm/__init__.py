"""Slurm as a scheduler: its commands or slurmrestd behind one port, marks in a node's reason, extra and weight."""
