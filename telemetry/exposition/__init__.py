"""Exporter pages: the text that Prometheus scrapes, in its format 0.0.4 and in OpenMetrics 1.0, read into samples."""
