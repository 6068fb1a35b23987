"""What changed since a fit: fleet, telemetry, workload, readings, failures or the level of risks.

In: the reference of a fit and the rows since. Out: ``CheckFindings``. Start with :mod:`~evaluation.drift.check`.
"""
