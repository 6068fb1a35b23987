"""Datasets on S3-compatible storage: where they are, how they get there, and how they are read there."""
