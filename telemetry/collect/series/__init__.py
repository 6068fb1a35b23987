"""What a Prometheus series is to us: which channel, of which GPU on which node, and how its samples become rows."""
