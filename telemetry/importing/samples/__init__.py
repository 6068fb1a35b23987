"""Samples from files to dataset buckets: ``intake`` validates rows, ``merge`` writes them bucket by bucket.

Merging deduplicates rows by unit and time, and downsamples data that is finer than the step (``rollup``).
"""
