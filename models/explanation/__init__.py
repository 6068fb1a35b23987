"""Why a unit was alerted: from fitted models and rows to the contribution of each feature, and to reasons as text.

Start with :mod:`~models.explanation.contributions`, which attributes a model's score to features, learner by learner;
:mod:`~models.explanation.alert_reasons` does it for the alerts of a backtest.
"""
