"""MLflow: records runs, registers bundles as model versions, and manages the champion.

Start with :mod:`~models.registry.store` (``sqlite:///`` or a tracking server). MLflow itself is imported there and in
the script that it logs, nowhere else.
"""
