"""The bundle that scores: that of a folder, or the registry's champion copied into one.

In: a folder or a registered model. Out: the bundle, loaded: :mod:`serving.champion.model` scores rows in the service,
:mod:`serving.champion.sources` asks who is champion and gives batch scoring its model.
"""
