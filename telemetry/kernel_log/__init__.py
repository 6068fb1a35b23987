"""Kernel logs of every form to events: one reader for imports, assessments and collectors.

``entries`` splits a log into messages, ``stamps`` and ``dating`` find their instants and hosts, ``catalogue`` knows
what a message means (``messages.yaml``), ``reader`` turns messages into events, ``importing`` reads a saved log.
``journal`` and ``log_files`` are the sources that collectors follow.
"""
