"""Import of files (Parquet, CSV, JSON, kernel logs) into a dataset: map, check against the inventory, merge.

Start with ``importer``, which imports files, and ``ingest``, the common write path into a dataset. ``suggestion`` finds
questions that only the files' owner can answer. ``files`` parses files, ``mapping`` defines how columns are mapped,
``batch`` evaluates rows, ``quarantine`` keeps unusable ones. ``inventory``, ``evidence`` and ``slots`` track which GPU
was where; ``samples`` reads and merges telemetry, ``events`` and ``tickets`` read events.
"""
