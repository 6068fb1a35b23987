"""Shared foundation: errors, durations, instants, settings, atomic files, HTTP, and clients.

``kubernetes`` and ``slurm`` read what these schedulers answer; ``programs`` runs their commands; ``server`` is what
HTTP services share. It imports no other room.
"""
