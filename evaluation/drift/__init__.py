"""What changed since a fit: fleet, telemetry, workload, readings, failures, risks or scores.

In come the reference of a fit and the rows since, out come ``CheckFindings``. Start with ``check``.
"""
