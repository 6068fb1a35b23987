"""The verbs from a dataset to a champion: features, backtests and their comparison, bundles, promotion, priors.

Start with ``stages``, which ``dvc repro`` runs; ``init`` creates a project with such a pipeline.
"""
