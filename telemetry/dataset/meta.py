"""dataset.json: what a dataset says about itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from telemetry.dataset.channel import Channel, channel_as_dict, channel_from_dict
from telemetry.dataset.runs import Runs
from telemetry.dataset.schema import READ_SCHEMA_VERSIONS, Unit
from telemetry.errors import InputError

META_NAME = "dataset.json"
"""Name of the file, written last: a folder that has it is a whole dataset."""


@dataclass(frozen=True, slots=True)
class DatasetMeta:
    """The content of dataset.json.

    ``schema_version``: version of the layout, see :data:`SCHEMA_VERSION` and ``RUNS_SCHEMA_VERSION``.
    ``unit``: what a row is about.
    ``span``: first and last instant (aware UTC) of anything observed.
    ``channels``: channels of the sample table in column order, roll-ups included; empty without telemetry.
    ``counts``: rows of each table (``samples``, ``events``, ``inventory``, ``jobs``), ``nodes``, ``gpus``, the samples
    of each bucket (``samples_by_bucket``), and what an import counted.
    ``sources``: what the dataset was made from: for files their name, size and SHA-256.
    ``sample_count``: whether the sample table has the column ``sample_count``.
    ``digest``: SHA-256 over the content, independent of paths, sources and the clock.
    ``run_days``: days of a run, see :class:`telemetry.dataset.runs.Runs`; None: a bucket is one run.
    ``files``: SHA-256 of each file that the digest is made of, by its path in the dataset; empty in a dataset that an
    older version wrote.
    """

    schema_version: int
    unit: Unit
    step: timedelta
    span: tuple[datetime, datetime]
    channels: dict[str, Channel]
    counts: dict[str, Any]
    quarantine: dict[str, int]
    sources: list[dict[str, Any]]
    buckets: int
    sample_count: bool
    digest: str = field(default="")
    run_days: int | None = None
    files: dict[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> Runs:
        """How the dataset's time is cut."""
        return Runs(self.run_days)


def instant_text(value: datetime) -> str:
    """Write an aware instant as ISO 8601 in UTC with milliseconds."""
    return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def content_of(meta: DatasetMeta) -> dict[str, Any]:
    """Return the JSON object of a DatasetMeta."""
    return {
        "schema_version": meta.schema_version,
        "unit": meta.unit,
        "step_seconds": meta.step.total_seconds(),
        "span": [instant_text(instant) for instant in meta.span],
        "buckets": meta.buckets,
        "run_days": meta.run_days,
        "sample_count": meta.sample_count,
        "channels": [channel_as_dict(channel) for channel in meta.channels.values()],
        "counts": meta.counts,
        "quarantine": dict(sorted(meta.quarantine.items())),
        "sources": meta.sources,
        "digest": meta.digest,
        "files": dict(sorted(meta.files.items())),
    }


def encode_meta(meta: DatasetMeta) -> bytes:
    """Return the bytes of dataset.json."""
    return (json.dumps(content_of(meta), indent=1, ensure_ascii=False) + "\n").encode()


def read_meta(root: Path, named: Path | None = None) -> DatasetMeta:
    """Read dataset.json of the dataset at ``root``; errors call it ``named``, where it has another name for users.

    Raises ``InputError`` if there is no dataset, its file is damaged, or a newer predrain wrote it.
    """
    path = (named or root) / META_NAME
    try:
        text = (root / META_NAME).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            "not a dataset: it has no dataset.json",
            str(named or root),
            "Give the folder that `predrain import` or `predrain simulate` wrote.",
        ) from None
    return decode_meta(text, str(path))


def decode_meta(text: str, where: str) -> DatasetMeta:
    """Decode the text of a dataset.json; errors say that it stands at ``where``.

    Raises ``InputError`` if it is damaged, or a newer predrain wrote it.
    """
    try:
        content: Mapping[str, Any] = json.loads(text)
        version = content["schema_version"]
        if version in READ_SCHEMA_VERSIONS:
            return _decode(content)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"dataset.json is damaged: {error}", where, "Import the sources again into this folder."
        ) from error
    raise InputError(
        f"the dataset has schema version {version}, this predrain reads "
        f"{READ_SCHEMA_VERSIONS[0]} to {READ_SCHEMA_VERSIONS[-1]}",
        where,
        "Import the sources again, or use the version of predrain that wrote it.",
    )


def _decode(content: Mapping[str, Any]) -> DatasetMeta:
    first, last = (datetime.fromisoformat(text) for text in content["span"])
    channels = [channel_from_dict(each) for each in content["channels"]]
    return DatasetMeta(
        schema_version=content["schema_version"],
        unit=content["unit"],
        step=timedelta(seconds=content["step_seconds"]),
        span=(first, last),
        channels={channel.name: channel for channel in channels},
        counts=dict(content["counts"]),
        quarantine=dict(content["quarantine"]),
        sources=list(content["sources"]),
        buckets=content["buckets"],
        sample_count=content["sample_count"],
        digest=content["digest"],
        run_days=Runs(content.get("run_days")).days,
        files=dict(content.get("files", {})),
    )
