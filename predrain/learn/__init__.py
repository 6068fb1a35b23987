"""The verbs from a dataset to a champion: features, backtests and their comparison, bundles, promotion, priors.

Start with ``backtest``. ``prepare`` and ``init`` are about DVC: the first stage, and a folder of the operator's own.
"""
