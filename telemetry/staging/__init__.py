"""The staging folder of collectors, and its compaction into a dataset.

Collectors stage tables in the folder ``DATASET.live`` (``folder``); start with ``compaction``, which merges them into
the dataset. ``staged`` rejects rows of a wrong clock; ``inventory`` derives an inventory from observations.
"""
