"""What may go wrong between the controller and what it talks to. None of it is a user's input."""

from __future__ import annotations


class SchedulerError(Exception):
    """The scheduler could not be read: nothing is known of the cluster."""


class SourceError(Exception):
    """The scores could not be read: nothing new is known of the GPUs."""


class LedgerError(Exception):
    """The ledger could not be written: nothing new may be done, for no record could explain it."""
