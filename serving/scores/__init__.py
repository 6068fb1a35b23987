"""Batch scoring: from a dataset and a bundle to score files, and from score files to a fleet's risks.

In: a dataset and a model. Out: one folder a decision time (``risks.parquet``, ``risks.jsonl``, ``summary.json``),
``latest.json``, ``status.json`` and a textfile. :mod:`serving.scores.batch` is where to start; it also sets until when
a risk is valid. The HTTP service and the pages read by :mod:`serving.scores.reading`.
"""
