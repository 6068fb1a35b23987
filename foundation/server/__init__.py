"""What the HTTP services share: bounded connections, bearer tokens from a file, and problem bodies (RFC 9457)."""
