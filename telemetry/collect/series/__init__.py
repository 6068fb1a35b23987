"""Prometheus series: mapping to a channel, GPU and node, and conversion of samples to rows."""
