"""The parts of the null check, ``benchmarks/null_check.py``."""
