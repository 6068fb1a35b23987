"""Where collectors put what they hear, and how it becomes part of a dataset.

Collectors write tables (``tables``) into the folder ``DATASET.live`` (``folder``); ``compaction`` brings what waits
there into the dataset, with an inventory of stays made from observations (``inventory``). Start with ``compaction``.
"""
