"""Slurm's nodes and accounting into drains, repairs and jobs. Start at collector.py."""
