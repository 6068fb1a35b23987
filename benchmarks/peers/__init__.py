"""What a user would otherwise take to compute window features: each peer's own best way, on the same files."""
