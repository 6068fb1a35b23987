"""Calibration: map scores to risks that are comparable across time, at the main and at further horizons.

Start with ``fitting``, which fits the map on scores and labels of a later slice; ``horizons`` adds further horizons.
"""
