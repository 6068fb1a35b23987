"""Errors of the systems that the controller uses; none is caused by user input."""

from foundation.errors import InputError


class SchedulerError(Exception):
    """The scheduler could not be read: the state of the cluster is unknown."""


class SourceError(Exception):
    """A source of evidence (scores, events, results) could not be read."""


class LedgerError(Exception):
    """The ledger could not be read or written: new actions are blocked, because they could not be recorded."""


_WRITTEN_FOR_PEOPLE = (SchedulerError, SourceError, LedgerError, InputError)


def described(error: BaseException) -> str:
    """Return an error's message, with its class name unless it is a predrain error."""
    return str(error) if isinstance(error, _WRITTEN_FOR_PEOPLE) else f"{type(error).__name__}: {error}"
