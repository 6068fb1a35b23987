"""Boolean values of labels, annotations and node features that operators set by hand.

Spelling varies. An unclear value is never permission: callers treat ``None`` as the safer choice, and report it.
"""

from typing import Final

_ON: Final = frozenset({"true", "t", "yes", "y", "on", "1", "enable", "enabled"})
_OFF: Final = frozenset({"false", "f", "no", "n", "off", "0", "disable", "disabled"})


def read_switch(value: str) -> bool | None:
    """Parse a boolean in any common spelling; None if it is neither true nor false.

    >>> read_switch(" 'False' "), read_switch("ON"), read_switch("24h"), read_switch("")
    (False, True, None, None)
    """
    word = value.strip().strip("\"'`").strip().casefold()
    return True if word in _ON else False if word in _OFF else None


def is_unmanaged(value: str) -> bool:
    """Whether a value of ``PREFIX/managed`` opts the node out: anything but a clear "true" does."""
    return read_switch(value) is not True


def is_set(value: str) -> bool:
    """Whether a marker like ``PREFIX/maintenance`` is set: by anything but a clear "false"."""
    return read_switch(value) is not False


def unclear(key: str, value: str) -> str | None:
    """Return the warning for a value that is neither true nor false; None if it is clear."""
    if read_switch(value) is not None:
        return None
    return f"{key}={value!r} is neither true nor false: treated as an opt-out until it is corrected or removed"
