"""Feature groups, one module each: the columns a group adds and how they are computed at a decision time.

To add a group, write a module here and register it in :mod:`features.matrix.plan`.
"""
