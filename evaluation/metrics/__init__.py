"""Measures of predictions at equal alerts, with bootstrap intervals by unit.

In come predictions with labels, out comes an ``Evaluation``. Start with ``evaluation``.
"""
