"""The feature groups, one module each: which columns a group adds and how they are computed at a decision time.

Add a group by writing a module here and registering it in :mod:`features.matrix.plan`.
"""
