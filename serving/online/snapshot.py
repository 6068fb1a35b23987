"""The online state on disk: a folder that is there in full or as it was, and is trusted only where it is whole.

::

    SNAPSHOT/
      frame-NAME.npz     a frame; linked, not written, where the snapshot before had it
      waiting.npz        samples whose step is not over, and what is known of each unit
      inventory.parquet, events.parquet
      state.json         settings, counts, and the size and digest of every other file; written last
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, get_args

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from features.blocks import table_of
from features.errors import InputError
from features.live import look_back
from features.matrix_meta import MatrixConfig
from features.pieces import Pair
from serving.online.frame import Frame
from serving.online.intake import Absorbed
from serving.online.packing import Form, Packed
from telemetry.atomic import FolderSwap, disk_errors, recover_folder
from telemetry.block import Block, Series
from telemetry.channel import channel_as_dict

VERSION = 1
"""Of the folder's layout."""

META = "state.json"
_COLD = "Remove the folder, begin without a sample, and push what is kept in files again."
_FORMS = get_args(Form)


@dataclass(frozen=True, slots=True)
class Held:
    """What a state holds besides its frames.

    ``pairs``: by unit number.
    ``waiting``: raw rows whose step is not over.
    ``units``: what is known of each unit (:attr:`serving.online.stepper.Stepper.units`); empty: nothing yet.
    ``closed_ms``: time up to which steps are closed; None: it follows from the clock.
    """

    inventory: pd.DataFrame
    events: pd.DataFrame
    pairs: list[Pair]
    totals: Absorbed
    order: int
    waiting: Block | None
    units: dict[str, NDArray[Any]]
    closed_ms: int | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a folder holds."""

    config: MatrixConfig
    held: Held
    frames: list[Frame]
    journal: int = 0


def sampled_of(config: MatrixConfig) -> dict[str, Any]:
    """Give what decides which samples are held: a state serves any bundle that agrees in it, a retrained one too."""
    return {
        "unit": config.unit,
        "step": config.step,
        "delay": config.features.delay,
        "every": config.decision.every,
        "look_back": look_back(config),
        "channels": [channel_as_dict(channel) for channel in config.channels.values()],
    }


@dataclass(frozen=True, slots=True)
class Captured:
    """What a state held at a moment."""

    config: MatrixConfig
    held: Held
    frames: Sequence[Frame]
    at: datetime

    def write(self, path: Path, journal: int = 0) -> int:
        """Write it, as :func:`write_snapshot` does."""
        return write_snapshot(path, self.config, self.held, self.frames, self.at, journal=journal)


def write_snapshot(
    path: Path, config: MatrixConfig, held: Held, frames: Sequence[Frame], now: datetime, *, journal: int = 0
) -> int:
    """Write a snapshot.

    ``journal``: number of the first file of the journal whose arrivals are not in it.
    Raises ``InputError`` if the disk is full, may not be written to, or another process writes the same folder.
    """
    recover_folder(path)
    before = _files_before(path)
    written: int = 0
    with FolderSwap(path) as swap, disk_errors(path):
        files: dict[str, dict[str, Any]] = {}
        described = []
        for frame in frames:
            name = f"frame-{frame.name}.npz"
            described.append(_described(frame))
            if name in before and _link(path / name, swap.path / name, before[name]):
                files[name] = before[name]
                continue
            files[name] = _write_arrays(swap.path / name, _frame_arrays(frame))
            written += files[name]["bytes"]
        files["waiting.npz"] = _write_arrays(swap.path / "waiting.npz", _held_arrays(held))
        for name, table in (("inventory", held.inventory), ("events", held.events)):
            files[f"{name}.parquet"] = _write_table(swap.path / f"{name}.parquet", table)
        written += sum(files[name]["bytes"] for name in ("waiting.npz", "inventory.parquet", "events.parquet"))
        content = {
            "version": VERSION,
            "written_at": now.astimezone(UTC).isoformat(),
            "config": config.to_json(),
            "pairs": [list(pair) for pair in held.pairs],
            "totals": asdict(held.totals),
            "order": held.order,
            "closed_ms": held.closed_ms,
            "journal": journal,
            "frames": described,
            "files": files,
        }
        body = json.dumps(content, ensure_ascii=False).encode()
        _write(swap.path / META, _digest(body).encode() + b"\n" + body)
        swap.commit()
    return int(written + len(body))


def read_snapshot(path: Path, config: MatrixConfig | None = None) -> Snapshot:
    """Read a snapshot, in full and checked.

    Raises ``InputError`` if there is none, it is damaged, of another version, or made for another bundle.
    """
    recover_folder(path)
    content = _read_meta(path)
    try:
        own = MatrixConfig.from_json(content["config"])
        files = content["files"]
        frames = [_read_frame(each, _checked(path, f"frame-{each['name']}.npz", files)) for each in content["frames"]]
        arrays = _read_arrays(_checked(path, "waiting.npz", files))
        held = Held(
            inventory=_read_table(_checked(path, "inventory.parquet", files)),
            events=_read_table(_checked(path, "events.parquet", files)),
            pairs=[(str(node), str(unit)) for node, unit in content["pairs"]],
            totals=Absorbed(**content["totals"]),
            order=int(content["order"]),
            waiting=_waiting(arrays),
            units={name[6:]: array for name, array in arrays.items() if name.startswith("units.")},
            closed_ms=int(content["closed_ms"]),
        )
        journal = int(content.get("journal", 0))
    except (OSError, KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile, pa.ArrowException) as error:
        _damaged(path, str(error) or type(error).__name__, error)
    if config is not None and sampled_of(config) != sampled_of(own):
        raise InputError("it was made for a bundle with other features", f"the snapshot {path}", _COLD)
    return Snapshot(own if config is None else config, held, frames, journal)


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        raw = (path / META).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise InputError("there is no snapshot", str(path), "Begin without a sample.") from None
    except OSError as error:
        _damaged(path, str(error), error)
    digest, _, body = raw.partition(b"\n")
    if digest.decode("ascii", "replace") != _digest(body):
        _damaged(path, f"{META} is not what was written")
    content = json.loads(body)
    if content["version"] != VERSION:
        raise InputError(
            f"it has version {content['version']}, this predrain reads {VERSION}", f"the snapshot {path}", _COLD
        )
    found: dict[str, Any] = content
    return found


def _damaged(path: Path, what: str, error: Exception | None = None) -> NoReturn:
    raise InputError(f"it is damaged: {what}", f"the snapshot {path}", _COLD) from error


def _described(frame: Frame) -> dict[str, Any]:
    columns = {"times": frame.times, **{f"c.{name}": packed for name, packed in frame.columns.items()}}
    return {
        "name": frame.name,
        "number": frame.number,
        "tier": frame.tier,
        "columns": {name: [packed.form, packed.scale] for name, packed in columns.items()},
    }


def _frame_arrays(frame: Frame) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {"units": frame.units, "starts": frame.starts}
    for name, packed in {"times": frame.times, **{f"c.{key}": each for key, each in frame.columns.items()}}.items():
        arrays |= {f"{name}:{part}": array for part, array in packed.arrays().items()}
    return arrays


def _read_frame(described: Mapping[str, Any], body: bytes) -> Frame:
    arrays = _read_arrays(body)
    columns: dict[str, Packed] = {}
    for name, (form, scale) in described["columns"].items():
        if form not in _FORMS:
            raise ValueError(f"a column of the form {form!r}")
        parts = {part: arrays[f"{name}:{part}"] for part in ("codes", "base", "valid")}
        columns[name] = Packed.of_arrays(form, int(scale), parts)
    return Frame(
        name=str(described["name"]),
        number=int(described["number"]),
        tier=int(described["tier"]),
        units=arrays["units"],
        starts=arrays["starts"],
        times=columns.pop("times"),
        columns={name[2:]: packed for name, packed in columns.items()},
    )


def _held_arrays(held: Held) -> dict[str, NDArray[Any]]:
    arrays = {f"units.{name}": array for name, array in held.units.items()}
    block = held.waiting
    if block is not None:
        keys: dict[str, NDArray[Any]] = {
            "unit": block.unit,
            "ms": block.ms,
            "order": block.order,
            "mig": block.mig,
            "count": block.count,
        }
        arrays |= {f"rows.{name}": array for name, array in keys.items()}
        for name, series in block.series.items():
            arrays |= {f"values.{name}": series.values, f"valid.{name}": series.valid}
    return arrays


def _waiting(arrays: Mapping[str, NDArray[Any]]) -> Block | None:
    if "rows.unit" not in arrays:
        return None
    names = [name[7:] for name in arrays if name.startswith("values.")]
    return Block(
        unit=arrays["rows.unit"],
        node=arrays["rows.unit"],
        ms=arrays["rows.ms"],
        order=arrays["rows.order"],
        mig=arrays["rows.mig"],
        count=arrays["rows.count"],
        series={name: Series(arrays[f"values.{name}"], arrays[f"valid.{name}"]) for name in names},
    )


def _read_table(body: bytes) -> pd.DataFrame:
    return pq.read_table(pa.BufferReader(body)).to_pandas()


def _write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return _write_sealed(path, buffer.getbuffer())


def _read_arrays(body: bytes) -> dict[str, NDArray[Any]]:
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _write_table(path: Path, table: pd.DataFrame) -> dict[str, Any]:
    sink = pa.BufferOutputStream()
    pq.write_table(table_of(table), sink)
    return _write_sealed(path, memoryview(sink.getvalue()))


def _write_sealed(path: Path, body: memoryview) -> dict[str, Any]:
    _write(path, body)
    return {"bytes": len(body), "digest": _digest(body)}


def _checked(path: Path, name: str, files: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Read a file that is what was written."""
    body = (path / name).read_bytes()
    seal = files[name]
    if len(body) != seal["bytes"]:
        raise ValueError(f"{name} has {len(body)} bytes, {seal['bytes']} were written")
    if _digest(body) != seal["digest"]:
        raise ValueError(f"{name} is not what was written")
    return body


def _write(path: Path, body: bytes | memoryview) -> None:
    with path.open("wb") as stream:
        stream.write(body)
        stream.flush()
        os.fsync(stream.fileno())


def _digest(body: bytes | memoryview) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def _files_before(path: Path) -> dict[str, dict[str, Any]]:
    """Give the files of the snapshot that is there, none where it cannot be trusted."""
    try:
        found: dict[str, dict[str, Any]] = _read_meta(path)["files"]
    except (InputError, ValueError, KeyError):
        return {}
    return found


def _link(source: Path, target: Path, seal: Mapping[str, Any]) -> bool:
    """Give a file a second name in the new folder; False where that cannot be done, and it must be written."""
    try:
        if source.stat().st_size != seal["bytes"]:
            return False
        os.link(source, target)
    except OSError:
        return False
    return True
