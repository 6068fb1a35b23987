"""Diagnosis of a telemetry source: channels it has and lacks, and how to enable them."""
