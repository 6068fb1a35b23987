"""Bundle: the result of one refit as a folder of files that can be verified and read without running code.

:mod:`~models.bundle.store` saves ``FittedModels`` as ``manifest.json``, ``learners/`` in the formats of their
libraries, and a model card, and loads them again. :mod:`~models.bundle.manifest` defines the manifest and verifies
files.
"""
