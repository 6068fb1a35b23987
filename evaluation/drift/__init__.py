"""Drift detection by cause: fleet, telemetry, workload, readings, failures, or calibration of risks.

Input: the reference of a fit and later rows. Output: ``CheckFindings``. Start with :mod:`~evaluation.drift.check`.
"""
