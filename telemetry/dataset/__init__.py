"""The validated dataset: Parquet buckets of samples by node, events, inventory, jobs and ``dataset.json``.

``store`` is what other rooms import: open a dataset, or write one in a single atomic step. Start with ``schema`` (what
the tables hold) and ``catalogue`` (the built-in channels; ``channels`` adds a
user's own, each a ``channel`` with kind, unit and range); ``layout`` and ``runs`` say how samples lie on disk. A
dataset is read from a folder or by ``s3://BUCKET/PREFIX`` (``place``, ``connection``, ``files``).
"""
