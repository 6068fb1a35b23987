"""Serving room: batch scoring and the HTTP service. Imports ``telemetry``, ``features``, ``models`` and ``policy``."""
