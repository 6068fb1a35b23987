"""Pages for people: the fleet, a node, a GPU, alert outcomes, the ledger.

In: the scores that the service holds, and what the scoring wrote of racks and outcomes. Out: HTML from ``templates/``.
:mod:`serving.pages.routes` is where to start: one function a page.
"""
