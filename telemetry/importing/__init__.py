"""Files (Parquet, CSV, JSON, kernel logs) into a dataset: mapped, checked against the inventory, quarantined, merged.

Start with ``importer``, which goes through an import from its sources to the swap. ``mapping`` turns a source's columns
and values into the dataset's, ``reading`` sets rows aside, ``quarantine`` keeps them and bounds how many they may be,
``event_runs`` drops repeated reports of one event, ``inventory`` merges stays, ends one where the next begins, and
looks up where a unit was. ``samples`` reads and merges telemetry.
"""
