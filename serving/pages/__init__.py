"""Pages for people: the fleet, a node, a GPU, alert outcomes, the ledger, the API's description, logging in.

In: the scores that the service holds, and what other processes read of a dataset. Out: HTML from ``templates/``.
:mod:`serving.pages.routes` is where to start: one function a page.
"""
