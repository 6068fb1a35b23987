"""How many connections the process can hold: a share of its file descriptors."""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass
from typing import Final, Self

_LOG = logging.getLogger(__name__)

_MOST_CONNECTIONS: Final = 4096
_MOST_BACKLOG: Final = 1024
_CONNECTION_SHARE: Final = 2
_BACKLOG_SHARE: Final = 16
# asyncio accepts a whole backlog at a time, and a few of them before the first protocol is told of its connection: the
# other half of the descriptors must hold those, and the files that land.


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """What a number of file descriptors allows."""

    connections: int
    backlog: int

    @classmethod
    def of(cls, descriptors: int) -> Self:
        """Return the bounds under a limit of file descriptors: at most half of them are connections."""
        return cls(
            max(1, min(_MOST_CONNECTIONS, descriptors // _CONNECTION_SHARE)),
            max(1, min(_MOST_BACKLOG, descriptors // _BACKLOG_SHARE)),
        )


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of file descriptors to its hard one; return the limit that then holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError) as error:
            _LOG.warning("the limit of %d file descriptors cannot be raised to %d: %s", soft, hard, error)
        else:
            soft = hard
    # "Without limit" is -1 here.
    return soft if soft >= 0 else _MOST_CONNECTIONS * _CONNECTION_SHARE
