"""What tests of logs, Slurm, diagnostics and tickets share: a clock, what staged, sources written by hand."""

from pathlib import Path
from typing import Any

from telemetry.dataset.event import Event
from telemetry.kernel_log.catalogue import shipped
from telemetry.kernel_log.reader import KernelLogReader, Lines, LogLine
from telemetry.staging.folder import StagingFolder
from tests.clock import Clock
from tests.staged import staged_table


def staging(folder: Path) -> StagingFolder:
    return StagingFolder(folder / "fleet.live", writer="test")


def staged(where: StagingFolder, kind: str = "events") -> list[dict[str, Any]]:
    return staged_table(where.root, kind).to_pylist()


class ScriptedSource:
    """Gives prepared reads."""

    name = "journal"

    def __init__(self, reads: list[list[LogLine]], position: dict[str, Any]) -> None:
        self.at = int(position.get("at", 0))
        self._reads = reads

    def read(self, wait_s: float) -> Lines:
        if self.at >= len(self._reads):
            return Lines([], {"at": self.at}, True)
        lines = self._reads[self.at]
        self.at += 1
        return Lines(lines, {"at": self.at}, False)

    def close(self) -> None:
        """Nothing is held open."""


def kernel_events(source: str, *lines: LogLine, node: str, clock: Clock) -> list[Event]:
    """The events that a collector of kernel messages stages for lines."""
    reader = KernelLogReader(shipped(), node=node, source=f"kernel_log:{source}")
    return list(reader.read(lines, lambda *_: clock()))
