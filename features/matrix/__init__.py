"""The feature matrix on disk, built bucket by bucket and extended by a day, and live rows from the same code.

Start with :mod:`features.matrix.building`, which also decides which rows of an existing matrix are reusable.
:mod:`~features.matrix.plan` defines the columns, :mod:`~features.matrix.grid` the rows, :mod:`~features.matrix.filling`
computes the rows of a bucket, :mod:`~features.matrix.parts` compares them with the fleet, and
:mod:`~features.matrix.live_rows` computes the rows of one decision time.
"""
