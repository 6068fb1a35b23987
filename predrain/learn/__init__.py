"""The verbs from a dataset to a champion: features, backtests and their comparison, bundles, promotion, priors.

Start with ``stages``, which ``dvc repro`` runs; ``init`` makes such a pipeline in a folder of the operator's own.
"""
