"""Live scraping of exporter pages: targets in; samples, XID events and observations of GPUs out.

``targets`` names what is scraped, ``watch`` fetches and reads a page and keeps one target's state, ``collector`` is the
loop and ``service`` puts them together. Start at ``collector``.
"""
