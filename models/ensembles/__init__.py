"""Parallel ensembles and cascades, and how rows are scored by all models at once.

In come fitted learners, out come scores, ranks and alerts of each decision time. Start with
``combining`` and ``cascade``.
"""
