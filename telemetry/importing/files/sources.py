"""Source files: discovery, format detection, and comparison with those already in the dataset."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from foundation.errors import InputError
from foundation.files import check_regular
from telemetry.dataset.meta import META_NAME
from telemetry.dataset.store import Dataset
from telemetry.importing.files.log_tables import is_log_document, is_log_table
from telemetry.importing.files.printed import fixed_columns
from telemetry.packing import UNPACKERS, read_errors

_SUFFIXES: Final = {
    **dict.fromkeys([".parquet", ".pq"], "parquet"),
    **dict.fromkeys([".csv", ".tsv"], "csv"),
    **dict.fromkeys([".json", ".jsonl", ".ndjson"], "json"),
}
_CSV_BYTES_PER_ROW, _PACKED_BYTES_PER_ROW = 100, 10


def stem_of(path: Path) -> str:
    """Return a file's name without its suffix and compression suffix."""
    return Path(path.stem).stem if is_packed(path) else path.stem


def is_packed(path: Path) -> bool:
    """Whether a file is compressed, based on its suffix."""
    return path.suffix.lower() in UNPACKERS


def kind_of(path: Path) -> str:
    """Return ``parquet``, ``csv``, ``json`` or ``other`` by suffix, ignoring compression suffixes."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in UNPACKERS]
    return _SUFFIXES.get(suffixes[-1] if suffixes else "", "other")


def is_kernel_log(path: Path) -> bool:
    """Whether an event source is a kernel log: text, or JSON or CSV exported from a journal or log store."""
    kind = kind_of(path)
    if kind == "parquet":
        return False
    if kind == "csv":
        return is_log_table(path)
    with read_errors(path):
        return fixed_columns(path) is None if kind == "other" else is_log_document(path)


def expand_sources(paths: tuple[Path, ...], kind: str) -> list[Path]:
    """Expand globs and folders (recursively) into files, sorted within each.

    Raises ``InputError`` if a path does not exist, a glob matches nothing, or a folder is empty.
    """
    files: list[Path] = []
    for path in [match for written in paths for match in _matches(written)]:
        if not path.exists():
            raise InputError(f"the {kind} file does not exist", str(path), "Check the path.")
        check_regular(path)
        if (path / META_NAME).is_file():
            part = path / ("telemetry" if kind == "samples" else "events.parquet")
            raise InputError(f"a dataset instead of {kind}", str(path), f"Give {part}, or your own files.")
        contents = sorted(path.rglob("*")) if path.is_dir() else []
        contents = [file for file in contents if file.is_file() and not file.name.startswith((".", "_"))]
        if path.is_dir() and not contents:
            raise InputError(f"the folder of {kind} is empty", str(path), "Give files, or a folder with files.")
        files += contents or [path]
    return files


def _matches(written: Path) -> list[Path]:
    """Expand a glob that the shell has not expanded; an existing path is not a glob."""
    matches = [] if written.exists() else sorted(Path(name) for name in glob(str(written.expanduser()), recursive=True))
    return matches or [written]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One source file; ``entry`` is its record in dataset.json, without path and import time."""

    role: str
    path: Path
    entry: dict[str, Any]


def new_sources(sources: Sequence[SourceFile], existing: Dataset | None) -> list[SourceFile]:
    """Return the sources that are not in the dataset yet, without duplicates.

    Raises ``InputError`` if a source was imported with other settings: its rows cannot be removed again.
    """
    entries = [] if existing is None else existing.meta.sources
    settings = {(entry["role"], entry["sha256"]): entry["settings"] for entry in entries if "sha256" in entry}
    fresh: list[SourceFile] = []
    for source in sources:
        key, current_settings = (source.role, source.entry["sha256"]), source.entry["settings"]
        if key not in settings:
            settings[key] = current_settings
            fresh.append(source)
        changed = sorted(
            name
            for name in {*current_settings, *settings[key]}
            if settings[key].get(name) != current_settings.get(name)
        )
        if changed:
            raise InputError(
                f"this source was imported before with other settings: {', '.join(changed)}",
                str(source.path),
                "Import all sources again into an empty folder, or go back to the settings of the first import.",
            )
    return fresh


def expected_rows(files: Iterable[Path]) -> int:
    """Estimate the number of rows in sample files from Parquet metadata or text size."""
    rows = 0
    for path in files:
        if kind_of(path) == "parquet":
            with suppress(pa.ArrowException):  # reported when the file is read
                rows += int(pq.read_metadata(path).num_rows)
        else:
            rows += path.stat().st_size // (_PACKED_BYTES_PER_ROW if is_packed(path) else _CSV_BYTES_PER_ROW)
    return rows
