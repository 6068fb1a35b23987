"""Rows of a feature matrix: read within a bound of memory, chosen for training, ranked and hashed.

In comes a matrix with labels as of a time, out go positions, labels and weights. Start with ``training_set``.
``failure_rate`` forecasts the rate of positives that calibration scales risks to.
"""
