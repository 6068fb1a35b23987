"""Errors of the features room; re-exports :class:`InputError` for the rooms above that do not import telemetry."""

from telemetry.errors import InputError

__all__ = ["InputError"]
