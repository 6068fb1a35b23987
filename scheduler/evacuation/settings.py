"""How nodes are emptied: what is asked first, how much at once, what follows, and through which hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal
from urllib.parse import urlsplit

_NONE = timedelta(0)


def _positive(value: object, *names: str) -> None:
    for name in names:
        if getattr(value, name) <= _NONE:
            raise ValueError(f"{name} is {getattr(value, name)}: give a positive time")


def _given(value: object, name: str) -> None:
    hook = getattr(value, name)
    if hook in ("webhook", "command") and getattr(value, hook) is None:
        raise ValueError(f"{name} is {hook!r}: give the {hook}")


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """A server that is told by POST.

    ``url``: ``https://…``; ``http://`` is for the same machine or a trusted net.
    ``token_file``: file with a bearer token, read at each call.
    """

    url: str
    token_file: str | None = None
    timeout: timedelta = timedelta(seconds=5)

    def __post_init__(self) -> None:
        _positive(self, "timeout")
        if not _usable(self.url):
            raise ValueError(f"url is {self.url!r}: give an http or https address with a host, without a password")


def _usable(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
        )
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class CommandSettings:
    """A command on the controller's machine. It runs without a shell, and at least once.

    ``argv``: the program, by its absolute path, and its first arguments.
    ``timeout``: then it is ended, with all that it started.
    """

    argv: tuple[str, ...]
    timeout: timedelta = timedelta(seconds=10)

    def __post_init__(self) -> None:
        _positive(self, "timeout")
        if not self.argv or not self.argv[0].startswith("/"):
            raise ValueError(f"argv is {list(self.argv)}: give the program by its absolute path")


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """What is asked of workloads before they are evicted.

    ``timeout``: how long an acknowledgement is waited for, where the workload names no time.
    ``max_timeout``: what a workload names is cut to this.
    ``default``: how workloads are asked that name no way themselves: by the operator's ``webhook`` or ``command``, or
    not (``none``).
    """

    timeout: timedelta = timedelta(minutes=5)
    max_timeout: timedelta = timedelta(minutes=30)
    default: Literal["none", "webhook", "command"] = "none"
    webhook: WebhookSettings | None = None
    command: CommandSettings | None = None

    def __post_init__(self) -> None:
        _positive(self, "timeout", "max_timeout")
        _given(self, "default")


@dataclass(frozen=True, slots=True)
class VerificationSettings:
    """The diagnostic that follows on an emptied node.

    ``method``: ``none``: none follows, and the mark ends with its prediction; ``scheduler``: a job of its own;
    ``webhook``, ``command``: the operator's.
    ``timeout``: without a result by then it is inconclusive.
    ``attempts``: how often it is tried while it is inconclusive.
    ``retry_after``: after one that failed or stayed inconclusive it is run again so much later, or as soon as the node
    booted or its GPUs are others: so a repaired node comes back by itself, and one that is not stays out. Shorter than
    the rule on a failed diagnostic holds.
    ``valid_for``: the jobs of a node that passed so lately are not moved again: it takes no new ones, and they run
    on.
    ``retention``: how long results are kept in the scheduler; a failed one holds its node as long as the rule says.
    """

    method: Literal["none", "scheduler", "webhook", "command"] = "none"
    webhook: WebhookSettings | None = None
    command: CommandSettings | None = None
    timeout: timedelta = timedelta(hours=2)
    attempts: int = 2
    retry_after: timedelta = timedelta(days=1)
    valid_for: timedelta = timedelta(hours=12)
    retention: timedelta = timedelta(days=14)

    def __post_init__(self) -> None:
        _positive(self, "timeout", "retry_after", "retention")
        if self.valid_for < _NONE:
            raise ValueError(f"valid_for is {self.valid_for}: give a time of zero or more")
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}: give a positive number")
        _given(self, "method")


@dataclass(frozen=True, slots=True)
class EvacuationSettings:
    """How nodes with a drain mark are emptied.

    ``enabled``: False: a drain mark keeps new work off, and the jobs end by themselves.
    ``max_round_duration``: what a round has not begun by then is left to the next one.
    ``max_concurrent``: workloads on their way out at once, in the whole fleet.
    ``retry_initial_delay``, ``retry_max_delay``: pause after a blocked or failed eviction, doubled each time.
    ``stuck_after``: a node that is not empty by then, counted from when its last wait was over, is told about once. It
    keeps its taint; nothing is forced.
    """

    enabled: bool = False
    max_round_duration: timedelta = timedelta(seconds=30)
    max_concurrent: int = 20
    retry_initial_delay: timedelta = timedelta(seconds=30)
    retry_max_delay: timedelta = timedelta(minutes=10)
    stuck_after: timedelta = timedelta(hours=1)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    verification: VerificationSettings = field(default_factory=VerificationSettings)

    def __post_init__(self) -> None:
        _positive(self, "max_round_duration", "retry_initial_delay", "retry_max_delay", "stuck_after")
        if self.max_concurrent < 1:
            raise ValueError(f"max_concurrent is {self.max_concurrent}: give a positive number")
