"""Values of labels, annotations and features that people write to allow or forbid something.

Such a value is typed by hand, so its spelling varies. What cannot be read is never taken for permission: callers treat
``None`` as the safer of the two, and report the value.
"""

from typing import Final

_ON: Final = frozenset({"true", "t", "yes", "y", "on", "1", "enable", "enabled"})
_OFF: Final = frozenset({"false", "f", "no", "n", "off", "0", "disable", "disabled"})


def read_switch(value: str) -> bool | None:
    """Read a switch in any usual spelling; None if it is neither on nor off.

    >>> read_switch(" 'False' "), read_switch("ON"), read_switch("24h"), read_switch("")
    (False, True, None, None)
    """
    word = value.strip().strip("\"'`").strip().casefold()
    return True if word in _ON else False if word in _OFF else None


def is_unmanaged(value: str) -> bool:
    """Whether a value of ``PREFIX/managed`` keeps predrain off: anything but a clear "true" does."""
    return read_switch(value) is not True


def is_set(value: str) -> bool:
    """Whether a marker such as ``PREFIX/maintenance`` is set; every value except a clear "false" counts."""
    return read_switch(value) is not False


def unclear(key: str, value: str) -> str | None:
    """Return what to report of a value that is neither on nor off; None if it is clear."""
    if read_switch(value) is not None:
        return None
    return f"{key}={value!r} is neither true nor false: treated as an opt-out until it is corrected or removed"
