"""Settings of evacuations: checkpoint requests, limits, verification and hooks."""

from dataclasses import field
from datetime import timedelta
from typing import Literal
from urllib.parse import urlsplit

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass as checked

from foundation.settings import NonNegativeTime, PositiveTime


def _require(value: object, name: str) -> None:
    hook = getattr(value, name)
    if hook in ("webhook", "command") and getattr(value, hook) is None:
        raise ValueError(f"{name} is {hook!r}: give the {hook}")


@checked(frozen=True, slots=True)
class WebhookSettings:
    """A server called by POST.

    ``url``: ``https://…``; ``http://`` only for the same machine or a trusted network.
    ``token_file``: file with a bearer token, read for each call.
    """

    url: str
    token_file: str | None = None
    timeout: PositiveTime = timedelta(seconds=5)

    def __post_init__(self) -> None:
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


@checked(frozen=True, slots=True)
class CommandSettings:
    """A command on the controller's machine, run without a shell.

    ``argv``: absolute path of the program, and its first arguments.
    """

    argv: tuple[str, ...]
    timeout: PositiveTime = timedelta(seconds=10)

    def __post_init__(self) -> None:
        if not self.argv or not self.argv[0].startswith("/"):
            raise ValueError(f"argv is {list(self.argv)}: give the program by its absolute path")


@checked(frozen=True, slots=True)
class CheckpointSettings:
    """Checkpoint requests before evictions."""

    timeout: PositiveTime = timedelta(minutes=5)
    max_timeout: PositiveTime = timedelta(minutes=30)
    default: Literal["none", "webhook", "command"] = "none"
    webhook: WebhookSettings | None = None
    command: CommandSettings | None = None

    def __post_init__(self) -> None:
        _require(self, "default")


@checked(frozen=True, slots=True)
class VerificationSettings:
    """The diagnostic that verifies evacuated nodes and probes idle ones."""

    method: Literal["none", "scheduler", "webhook", "command"] = "none"
    webhook: WebhookSettings | None = None
    command: CommandSettings | None = None
    timeout: PositiveTime = timedelta(hours=2)
    probe_timeout: PositiveTime = timedelta(minutes=30)
    attempts: PositiveInt = 2
    retry_after: PositiveTime = timedelta(days=1)
    valid_for: NonNegativeTime = timedelta(hours=12)
    retention: PositiveTime = timedelta(days=14)

    def __post_init__(self) -> None:
        _require(self, "method")


@checked(frozen=True, slots=True)
class EvacuationSettings:
    """Settings of evacuations; docs/reference/settings.md has the table of all settings."""

    enabled: bool = False
    max_round_duration: PositiveTime = timedelta(seconds=30)
    max_concurrent: PositiveInt = 20
    retry_initial_delay: PositiveTime = timedelta(seconds=30)
    retry_max_delay: PositiveTime = timedelta(minutes=10)
    stuck_after: PositiveTime = timedelta(hours=1)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    verification: VerificationSettings = field(default_factory=VerificationSettings)
