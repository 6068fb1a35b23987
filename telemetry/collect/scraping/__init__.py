"""Scraping: one page or answer of each target, once an interval.

``targets`` reads what to scrape, ``scraper`` fetches an answer within bounds, ``collector`` is the loop over all
targets, as a process. What a target's answers are, a source says in its watch:
:mod:`telemetry.collect.exporters` and :mod:`telemetry.collect.gpud`.
"""
