"""Metrics of predictions, with cluster bootstrap intervals and comparisons at equal numbers of alerts.

Input: predictions with labels. Output: an ``Evaluation``. Start with ``evaluation``. ``aggregation`` turns predictions
of units into decisions about nodes; ``metrics`` resamples clusters.
"""
