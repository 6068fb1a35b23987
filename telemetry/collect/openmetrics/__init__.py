"""OpenMetrics dumps of a Prometheus database into landed samples. Start at dump.py."""
