"""Alternatives to compute window features with, each used in its own best way on the same files."""
