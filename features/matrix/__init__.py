"""A dataset in, a feature matrix on disk out, bucket by bucket and extended by a day; live rows by the same code.

Start with :mod:`features.matrix.building`. :mod:`~features.matrix.plan` decides the columns,
:mod:`~features.matrix.grid` the rows, :mod:`~features.matrix.filling` fills the rows of a bucket,
:mod:`~features.matrix.parts` compares them with the fleet, :mod:`~features.matrix.building` says which rows of an
older matrix hold, and :mod:`~features.matrix.live_rows` makes those of one decision time.
"""
