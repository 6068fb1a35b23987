"""Shared foundation: errors, durations, instants, settings, atomic files, HTTP, and clients.

``kubernetes`` and ``slurm`` parse the responses of the schedulers, ``programs`` runs their commands, and ``server`` is
shared by the HTTP services. It imports no other room.
"""
