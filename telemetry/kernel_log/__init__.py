"""Kernel logs of every form to events: one reader for imports, assessments and collectors.

``entries`` splits a log into messages, ``stamps`` finds their times and hosts, ``catalogue`` classifies messages
(``messages.yaml`` and XIDs), ``reader`` turns messages into events, ``importing`` reads a saved log.
``journal`` and ``log_files`` are the sources that collectors follow.
"""
