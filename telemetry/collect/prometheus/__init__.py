"""History from a Prometheus server, or from one that speaks its API: raw samples with their own time stamps.

Start with ``backfill``; ``client`` asks the server, :mod:`telemetry.collect.series` reads its series.
"""
