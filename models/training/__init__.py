"""One refit: training window, rows, learners, ensembles and their calibration.

Start with ``trainer``, which turns a matrix and a time into ``FittedModels``. ``spans`` selects the training window,
``schedule`` plans the refits of a backtest and K, ``final`` fits for the bundle, and ``reference`` summarizes the
training data for drift checks.
"""
