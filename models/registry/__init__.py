"""MLflow: runs are recorded, bundles become versions of a model, and one of them is the champion.

In: bundles, parameters and metrics. Out: a store (``sqlite:///`` or a tracking server) and the champion's bundle.
Start with :mod:`~models.registry.store`; MLflow itself is imported there and in the script that it logs, nowhere else.
"""
