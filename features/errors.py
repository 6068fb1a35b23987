"""Errors of the features room; re-exports those of telemetry for the rooms above that do not import it."""

from telemetry.errors import InputError, TooEarlyError

__all__ = ["InputError", "TooEarlyError"]
