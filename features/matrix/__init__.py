"""A dataset in, a feature matrix on disk out, bucket by bucket and extended by a day; live rows by the same code.

Start with :mod:`features.matrix.building`; :mod:`features.matrix.plan` decides the columns,
:mod:`features.matrix.filling` fills rows, :mod:`features.matrix.live_rows` scores one decision time.
"""
