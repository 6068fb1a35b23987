"""Samples of files into a dataset's buckets: ``intake`` evaluates rows, ``merge`` writes them bucket by bucket.

Between the two, rows of one unit and time become one, and finer samples one a step (``rollup``).
"""
