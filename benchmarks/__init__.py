"""Commands that measure the figures of README and docs; ``shared`` has their helpers."""
