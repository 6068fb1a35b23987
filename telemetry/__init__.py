"""Telemetry room: sources of samples, events, inventory and jobs, and the one validated store they end in.

It imports ``foundation`` only. Everything downstream reads a :class:`telemetry.dataset.store.Dataset`.
"""
