"""The replay of history: refits in time order, here or on workers, precision targets, and the gate of promotion.

In come a matrix and parameters, out come predictions and folds. Start with ``run`` and ``sliding``.
"""
