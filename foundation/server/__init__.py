"""Shared parts of the HTTP services: connection limits, bearer tokens from a file, problem details (RFC 9457)."""
