"""Metrics of predictions, with cluster bootstrap intervals and comparisons at equal numbers of alerts.

``evaluation``, the module to read first, computes an ``Evaluation`` from labelled predictions. ``aggregation`` combines
the risks of units into risks of nodes; ``metrics`` resamples clusters.
"""
