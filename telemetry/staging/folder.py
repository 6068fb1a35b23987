"""The staging folder: small immutable files written by collectors next to a dataset, and their schemas."""

import contextlib
import itertools
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from foundation.errors import InputError
from foundation.files import disk_errors, fsync_path, stamp_of, write_bytes
from foundation.place import refuse_storage
from telemetry.dataset.channels import CATALOGUE, Channel, with_rollups
from telemetry.dataset.schema import CHANNEL_TYPES, EVENTS, INSTANT, INVENTORY, JOBS, column_as

Kind = Literal["samples", "events", "inventory", "jobs"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

SAMPLE_KEYS: Final = pa.schema(
    [
        pa.field("timestamp", INSTANT, nullable=False),
        pa.field("node", pa.string(), nullable=False),
        pa.field("gpu", pa.string()),
        pa.field("mig_instance", pa.string()),
    ]
)
"""Key columns of staged samples, before the channels: ``gpu`` is null for a node without GPUs."""

STAGED_EVENTS: Final = EVENTS.append(pa.field("pci_bus_id", pa.string()))
"""Events of collectors; if only a PCI address is known, compaction finds the GPU."""

STAGED_INVENTORY: Final = pa.schema(
    [
        *(field for field in INVENTORY if field.name not in ("installed_at", "removed_at")),
        pa.field("seen_at", INSTANT, nullable=False),
    ]
)
"""Observations of a GPU (null: of a node) on a node at a time, with its attributes."""

_FIXED: Final = MappingProxyType({"events": STAGED_EVENTS, "inventory": STAGED_INVENTORY, "jobs": JOBS})

Rows = Sequence[Mapping[str, Any]]
"""Rows of one kind in JSON types, times in milliseconds since 1970 UTC."""


def rows_table(kind: Kind, rows: Rows) -> pa.Table:
    """Convert rows of events, inventory or jobs to a table; missing keys become null."""
    schema = _FIXED[kind]
    arrays = [pa.array([row.get(field.name) for row in rows], type=field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def lay_out(kind: Kind, table: pa.Table, channels: Mapping[str, Channel]) -> pa.Table:
    """Convert a table to the staging schema; missing columns become null, except channels of samples.

    ``channels``: channels that may occur in samples.
    Raises ``ValueError`` if a column is unknown, missing, null but required, or of another type.
    """
    if kind == "samples":
        known = with_rollups(channels)
        channel_names = [name for name in table.column_names if name in known]
        fields = [pa.field(name, CHANNEL_TYPES[known[name].kind]) for name in channel_names]
        if "sample_count" in table.column_names:
            fields.append(pa.field("sample_count", pa.int32()))
        schema = pa.schema([*SAMPLE_KEYS, *fields])
    else:
        schema = _FIXED[kind]
    unknown = [name for name in table.column_names if name not in schema.names]
    if unknown:
        raise ValueError(f"{kind} cannot be staged with the columns {unknown}; known columns: {schema.names}")
    missing = [field.name for field in schema if not field.nullable and field.name not in table.column_names]
    if missing:
        raise ValueError(f"{kind} cannot be staged without the columns {missing}")
    arrays = []
    for field in schema:
        try:
            column = column_as(table, field)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{kind} cannot be staged: column {field.name!r}: {error}") from error
        if not field.nullable and column.null_count:
            raise ValueError(f"{kind} cannot be staged with {column.null_count} nulls in {field.name!r}")
        if field.name == "gpu":
            column = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)  # "" names no GPU
        arrays.append(column)
    return pa.Table.from_arrays(arrays, schema=schema)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,180}\Z")
_NAMED: Final = "named-"
_LEDGER: Final = "compacted-names.txt"
NAMES_KEPT_S: Final = 30 * 86400
"""How long a name is remembered after its file was compacted; longer than any backfill or outage should last."""

_STALE_TEMPORARY_S = 3600


def staging_of(dataset: Path) -> Path:
    """Return the staging folder ``DATASET.live``; raises ``InputError`` for object storage."""
    refuse_storage(dataset)
    real = Path(os.path.realpath(dataset))
    return real.with_name(real.name + ".live")


class StagingFolder:
    """Stages tables as files.

    ``root``: the staging folder, created with the first file. ``writer``: short name of the collector, part of the
    names of its files. ``channels``: channels that samples may have; default: the catalogue.

    A file is written under ``tmp/`` and hard-linked to its final name, so that it appears atomically, and only one of
    two writers of a name succeeds. Any number of processes may write to one folder; only
    :func:`telemetry.staging.compaction.compact` removes files.
    """

    def __init__(self, root: Path, *, writer: str, channels: Mapping[str, Channel] | None = None) -> None:
        if not _NAME.match(writer):
            raise ValueError(f"{writer!r} cannot name a collector: use letters, digits, - and .")
        self.root = Path(root)
        self._writer = writer
        self._channels = CATALOGUE if channels is None else channels
        self._sequence = itertools.count(1)
        self._names: frozenset[tuple[str, str]] = frozenset()
        self._names_stamp: tuple[int, ...] | None = None

    def stage(self, kind: Kind, table: pa.Table, *, name: str | None = None) -> Path | None:
        """Write a table as one file; None if it is empty or the name was staged before.

        ``table``: columns as in :mod:`telemetry.staging.folder`; missing ones become null.
        ``name``: idempotency key of the caller: a name is staged only once, even after its compaction.
        Raises ``ValueError`` if the table does not fit the kind, or the name has characters other than letters, digits,
        ``-._``.
        Raises ``InputError``, without a partial file, if the disk is full or not writable.
        """
        if name is not None and not _NAME.match(name):
            raise ValueError(f"{name!r} cannot name a staged file: use letters, digits, - . and _, at most 180")
        if table.num_rows == 0 or (name is not None and self.is_staged(kind, name)):
            return None
        laid = lay_out(kind, table, self._channels)
        folder = self.root / kind
        final = folder / f"{_NAMED + name if name is not None else self._fresh_name()}.parquet"
        temporary = self.root / "tmp" / f"{self._fresh_name()}.parquet"
        with disk_errors(final):
            temporary.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(parents=True, exist_ok=True)
            try:
                pq.write_table(laid, temporary, compression="zstd", compression_level=1, use_dictionary=["node", "gpu"])
                fsync_path(temporary)
                try:
                    os.link(temporary, final)
                except FileExistsError:  # another writer of the same name was faster
                    return None
                fsync_path(folder)
            finally:
                temporary.unlink(missing_ok=True)
        return final

    def is_staged(self, kind: Kind, name: str) -> bool:
        """Whether a name was staged; compacted names are remembered for :data:`NAMES_KEPT_S`."""
        return (self.root / kind / f"{_NAMED}{name}.parquet").exists() or (kind, name) in self._compacted_names()

    def waiting(self, kind: Kind | None = None) -> list[Path]:
        """Return the files waiting for compaction, oldest first."""
        files: list[tuple[int, str, Path]] = []
        for folder in KINDS if kind is None else (kind,):
            for path in (self.root / folder).glob("*.parquet"):
                with contextlib.suppress(FileNotFoundError):  # compacted just now
                    files.append((path.stat().st_mtime_ns, path.name, path))
        return [path for *_, path in sorted(files)]

    def state(self, name: str) -> Path:
        """Return the path of a collector's state file; write it with :func:`foundation.files.write_bytes`."""
        if not _NAME.match(name):
            raise ValueError(f"{name!r} cannot name a state file")
        folder = self.root / "state"
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def remember_compacted(self, paths: list[Path], now_s: float) -> None:
        """Record the names of compacted files before their removal; drop expired names."""
        ledger = self.state(_LEDGER)
        entries = {(kind, name): s for s, kind, name in _read_ledger(ledger) if float(s) > now_s - NAMES_KEPT_S}
        for path in paths:
            if path.stem.startswith(_NAMED):
                entries.setdefault((path.parent.name, path.stem.removeprefix(_NAMED)), f"{now_s:.0f}")
        lines = [f"{seconds} {kind} {name}\n" for (kind, name), seconds in entries.items()]
        write_bytes(ledger, "".join(lines).encode())

    def sweep(self) -> None:
        """Remove temporary files of killed writers."""
        for path in (self.root / "tmp").glob("*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _STALE_TEMPORARY_S:
                    path.unlink()

    def put_aside(self, path: Path, folder: str) -> Path:
        """Move a staged file to a folder under the root, keeping its kind and name; return its new path."""
        target = self.root / folder / path.parent.name / path.name
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            return path.replace(target)

    def _compacted_names(self) -> frozenset[tuple[str, str]]:
        ledger = self.root / "state" / _LEDGER
        stamp = stamp_of(ledger)
        if stamp != self._names_stamp:
            self._names = frozenset((kind, name) for _, kind, name in _read_ledger(ledger))
            self._names_stamp = stamp
        return self._names

    def _fresh_name(self) -> str:
        """Return a unique name that sorts by time and then by this writer's sequence."""
        token = secrets.token_hex(4)
        return f"{time.time_ns() // 1_000_000:013d}-{self._writer}-{os.getpid()}-{next(self._sequence):06d}-{token}"


def _read_ledger(ledger: Path) -> list[tuple[str, str, str]]:
    """Return the compacted names as (time of compaction in seconds, kind, name)."""
    try:
        entries = [line.split(" ") for line in ledger.read_text(encoding="utf-8").splitlines()]
        return [(seconds, kind, name) for seconds, kind, name in entries]
    except FileNotFoundError:
        return []
    except ValueError:
        raise InputError(
            "the list of compacted names is damaged",
            str(ledger),
            "Remove it: compacted files may then be staged again.",
        ) from None
