"""Rows of a feature matrix: bounded-memory reading, selection for training, ranking and hashing.

Start with ``training_set``, which turns a matrix with labels as of a time into positions, labels and weights.
``failure_rate`` forecasts the positive rate that calibration scales risks to.
"""
