"""Why a unit was alerted: from fitted models and rows to what each feature added, and to reasons as text.

Start with :mod:`~models.explanation.contributions`, which attributes a model's score to features, learner by learner;
:mod:`~models.explanation.reasons` writes the text.
"""
