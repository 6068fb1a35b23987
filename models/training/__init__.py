"""One refit: the span, the rows, the learners, the ensembles and their calibration.

In comes a matrix and a time, out come ``FittedModels``. Start with ``trainer``; ``spans`` chooses the span,
``schedule`` the refits of a backtest and K, ``final`` fits for the bundle, and ``reference`` summarizes the training
data for drift checks.
"""
