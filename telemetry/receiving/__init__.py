"""The receiver: an HTTP endpoint to which Prometheus (remote write) and our own collectors push telemetry."""
