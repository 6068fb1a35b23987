"""History from a Prometheus server, or from one that speaks its API: raw samples with their own time stamps."""
