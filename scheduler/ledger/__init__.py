"""Append-only record of decisions and calls in SQLite, written by the controller, for audits and replay.

Start with ``schema``. ``sqlite_ledger`` writes, ``reader`` queries, ``export`` converts drains and results to events.
"""
