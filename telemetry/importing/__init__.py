"""Files (Parquet, CSV, JSON, kernel logs) into a dataset: mapped, checked against the inventory, quarantined, merged.

Start with ``importer``, which brings files in, and ``ingest``, the one way into a dataset. ``asking`` finds out what
only the owner of the files can tell. ``files`` reads them, ``mapping`` says how their columns become the dataset's,
``batch`` evaluates rows, ``quarantine`` keeps those that cannot be used. ``inventory``, ``evidence`` and ``slots`` know
which GPU was where; ``samples`` reads and merges telemetry, ``events`` and ``tickets`` what happened.
"""
