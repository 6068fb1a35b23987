"""What the reader of kernel messages gets from a file or the journal, and the port of such sources."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, Protocol


class LogLine(NamedTuple):
    """One message that may be about a GPU.

    ``when``: None where the line has no stamp; a text (a key of :data:`telemetry.kernel_log.dating.ADVICE`) where the
    stamp lacks something.
    ``since_boot``: seconds, where the line gives them.
    ``history``: it is older than the collector: its events are dated as an import would date them, not as news.
    ``number``, ``line``: line of the source, from 1, and its text.
    ``quoted``: another program than the kernel repeats the message, at a time of its own.
    """

    message: str
    when: datetime | str | None
    host: str | None = None
    boot_id: str | None = None
    history: bool = False
    since_boot: float | None = None
    number: int = 0
    line: str = ""
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Lines:
    """What a source gives in one read.

    ``position``: where to go on after these lines, in JSON types.
    ``n_lines``: lines and messages that were read, those included that are not about a GPU.
    """

    lines: list[LogLine]
    position: dict[str, Any]
    drained: bool
    n_lines: int = 0


class LogSource(Protocol):
    """Where kernel messages come from; made from the ``position`` after the lines of an earlier process."""

    name: str

    def read(self, wait_s: float) -> Lines:
        """Return what is there; where that is nothing, after ``wait_s`` seconds."""
        ...

    def close(self) -> None:
        """Let go of files and processes."""
        ...
