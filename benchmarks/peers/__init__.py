"""Other libraries that compute window features, each used in its most efficient way on the same files."""
