"""Slurm collector: drains and repairs from node states, jobs from accounting."""
