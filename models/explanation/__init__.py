"""Why a unit was alerted: from fitted models and rows to what each feature added, and to reasons as text.

Start with :mod:`~models.explanation.members`, which takes a model's score apart by its members;
:mod:`~models.explanation.contributions` does so for one learner, :mod:`~models.explanation.reasons` writes the text.
"""
