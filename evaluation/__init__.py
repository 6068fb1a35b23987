"""Model evaluation on historical data: backtest, metrics, drift detection and GPU-hours saved.

Input: a feature matrix and parameters. Output: predictions, metrics with confidence intervals, and verdicts. Start
with ``backtest.run``; ``drift`` compares recent rows with the training window of the last fit.
"""
