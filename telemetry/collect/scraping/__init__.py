"""Scraping of HTTP targets at an interval, bounded in time and memory.

``targets`` resolves the targets, ``collector`` is the scrape loop.
:mod:`telemetry.collect.exporters` and :mod:`telemetry.collect.gpud` parse the responses.
"""
