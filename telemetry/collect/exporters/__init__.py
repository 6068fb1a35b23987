"""Live scraping of exporter pages: target lists in; samples, XID events and observations of GPUs out.

``targets`` and ``target_lists`` name what is scraped, ``scraping`` fetches a page, ``watch`` reads it and keeps one
target's state, ``collector`` is the loop and ``service`` puts them together. Start at ``collector``.
"""
