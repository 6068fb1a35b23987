"""Files (Parquet, CSV, JSON, kernel logs) into a dataset: mapped, checked against the inventory, quarantined, merged.

Start with ``importer``, which goes through an import from its sources to the swap. ``mapping`` says how a source's own
words become ours, ``quarantine`` keeps what cannot be used and bounds how much that may be, ``event_runs`` drops what
several sources report of one event, ``inventory`` merges stays, ends one where the next begins, and looks up
who was where. ``samples`` reads and merges telemetry.
"""
