"""Kernel log parser shared by imports, assessments and collectors.

``entries`` splits a log into messages, ``stamps`` parses timestamps and hostnames, ``catalogue`` classifies messages
(``messages.yaml`` and XIDs), ``reader`` turns messages into events, ``importing`` reads a saved log.
Collectors tail the sources in ``journal`` and ``log_files``.
"""
