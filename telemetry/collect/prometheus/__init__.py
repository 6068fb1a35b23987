"""Backfill of raw samples, with their original timestamps, from Prometheus or a server with its HTTP API.

Start with ``backfill``; ``client`` queries the server, :mod:`telemetry.collect.series` identifies the series.
"""
