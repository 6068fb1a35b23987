"""Parallel ensembles and cascades, and how rows are scored by all models together.

In come fitted learners, out come scores, ranks and alerts of each decision time. Start with
``combining`` and ``cascade``.
"""
