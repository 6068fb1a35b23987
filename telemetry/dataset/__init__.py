"""The validated dataset: Parquet buckets of samples by node, events, inventory, jobs and ``dataset.json``.

``store`` reads a dataset, ``writer`` writes one atomically. Start with ``schema`` (columns of the tables) and
``channels`` (the catalogue in ``catalogue.csv``, and channels declared by users). ``layout`` divides samples into
files, ``parquet`` reads and writes them. A dataset is read from a folder or from ``s3://BUCKET/PREFIX`` (``files``).
"""
