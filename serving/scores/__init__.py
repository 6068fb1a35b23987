"""Batch scoring: writes score files from a dataset and a bundle, and reads them back as a fleet's risks.

In: a dataset and a model. Out: one folder per decision time (``risks.parquet``, ``risks.jsonl``, ``summary.json``),
``latest.json``, ``status.json`` and a textfile. Start with :mod:`serving.scores.batch`, which also sets the expiry of
risks. The HTTP service and the pages read scores through :mod:`serving.scores.reading`, which tells if they are stale.
"""
