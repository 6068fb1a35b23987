"""The bundle that a service follows: a folder, or the registry's champion copied into one by a process of its own.

In: a folder or a registered model. Out: the path of the bundle to serve. Start with :mod:`serving.champion.sources`.
"""
