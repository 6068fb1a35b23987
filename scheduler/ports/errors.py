"""What may go wrong between the controller and what it talks to. None of it is a user's input."""

from foundation.errors import InputError


class SchedulerError(Exception):
    """The scheduler could not be read: nothing is known of the cluster."""


class SourceError(Exception):
    """The scores could not be read: nothing new is known of the GPUs."""


class LedgerError(Exception):
    """The ledger could not be written: nothing new may be done, for no record could explain it."""


_WRITTEN_FOR_PEOPLE = (SchedulerError, SourceError, LedgerError, InputError)


def described(error: Exception) -> str:
    """Return an error's message, with its class where the message was not written for people."""
    return str(error) if isinstance(error, _WRITTEN_FOR_PEOPLE) else f"{type(error).__name__}: {error}"
