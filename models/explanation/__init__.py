"""Explanation of alerts: contribution of each feature to a score, and reasons as text.

Start with :mod:`~models.explanation.contributions`, which attributes a model's score to features, learner by learner;
:mod:`~models.explanation.alert_reasons` explains the alerts of a backtest.
"""
