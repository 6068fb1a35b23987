"""Scraping: one page or answer of each target, once an interval.

``targets`` lists what to scrape, ``collector`` scrapes it, within bounds of time and memory, as a process.
:mod:`telemetry.collect.exporters` and :mod:`telemetry.collect.gpud` parse the answers.
"""
