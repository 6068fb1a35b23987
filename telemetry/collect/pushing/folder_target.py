"""Sends landed files to another landing folder, on a file system that both sides see."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from telemetry.channel import Channel
from telemetry.collect.pushing.target import Later, Refused
from telemetry.errors import InputError
from telemetry.landing.folder import Landing
from telemetry.landing.tables import Kind


def read_landed(path: Path) -> pa.Table:
    """Read a landed file; :class:`Refused` where it cannot be read."""
    try:
        with pq.ParquetFile(path) as stored:
            return stored.read()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise Refused(f"the file cannot be read: {error}") from error


class FolderTarget:
    """Another landing folder; implements :class:`telemetry.collect.pushing.target.Target`.

    ``folder``: must exist whenever something is sent: a folder made in place of a file system that is not mounted would
    take everything and show it to nobody.
    ``channels``: channels that samples may have.
    """

    def __init__(self, folder: Path, writer: str, channels: Mapping[str, Channel]) -> None:
        self._folder = folder
        self._landing = Landing(folder, writer=writer, channels=channels)

    def __str__(self) -> str:
        return str(self._folder)

    def send(self, kind: Kind, path: Path, name: str) -> None:
        """Land the file there under its name."""
        table = read_landed(path)
        if not self._folder.is_dir():
            raise Later(f"the folder {self._folder} does not exist: mount its file system, or make it")
        try:
            self._landing.land(kind, table, name=name)
        except ValueError as error:
            raise Refused(str(error)) from error
        except (InputError, OSError) as error:
            raise Later(str(error)) from error
