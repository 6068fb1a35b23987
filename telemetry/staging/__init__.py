"""The staging folder of collectors, and its compaction into a dataset.

Collectors stage tables in the folder ``DATASET.live`` (``folder``). ``compaction`` merges the staged files into the
dataset, with an inventory derived from observations (``inventory``). Start with ``compaction``.
"""
