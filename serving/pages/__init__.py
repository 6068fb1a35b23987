"""Web pages: the fleet, a node, a GPU, alert outcomes, the ledger.

In: the cached scores, and racks and alert outcomes written by batch scoring. Out: HTML from ``templates/``.
Start with :mod:`serving.pages.routes`: one function per page.
"""
