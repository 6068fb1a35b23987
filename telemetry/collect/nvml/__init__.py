"""Telemetry of a node without an exporter, read from the NVIDIA driver itself."""
