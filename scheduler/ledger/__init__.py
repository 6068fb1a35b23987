"""The append-only record of every decision and call, in SQLite: the controller writes, people ask why and replay.

Start with ``schema``. ``sqlite_ledger`` writes, ``reader`` answers, and makes events of drains and diagnostics.
"""
