"""What models are worth on history: the backtest, its measures, and what drifted.

In come a feature matrix and parameters, out come predictions, measurements with intervals and verdicts. Start with
``backtest.run``; ``metrics`` measures predictions, ``drift`` compares a fit with the rows since.
"""
