"""Diagnosis of a telemetry source: channels it has and lacks, their importance, and how to enable them."""
