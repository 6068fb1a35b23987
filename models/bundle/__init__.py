"""The bundle: everything that one refit made, as a folder of files that can be verified and read without running code.

In: ``FittedModels``. Out: ``manifest.json``, ``learners/`` in the formats of their libraries, and a
model card; and back again. Start with :mod:`~models.bundle.store`, which saves and loads. What a manifest holds, and
how files are verified, is in :mod:`~models.bundle.manifest`.
"""
