"""Backtest with sliding refits, run locally or on workers; precision targets; the promotion gate.

Input: a feature matrix and parameters. Output: predictions and folds. Start with ``run`` and ``sliding``.
"""
