"""The validated dataset: Parquet buckets of samples by node, events, inventory, jobs and ``dataset.json``.

``store`` opens a dataset, ``writer`` writes one in a single atomic step. Start with ``schema`` (what the tables hold)
and ``channels`` (reads the catalogue, ``catalogue.csv``, and a user's own channels); ``layout`` says how
samples lie on disk. A dataset is read from a folder or by ``s3://BUCKET/PREFIX`` (``files``).
"""
