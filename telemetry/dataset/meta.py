"""dataset.json: the metadata of a dataset."""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, TypeAdapter, ValidationError

from foundation.errors import InputError
from telemetry.dataset.channels import Channel, channel_as_dict
from telemetry.dataset.layout import Runs
from telemetry.dataset.schema import READ_SCHEMA_VERSIONS, Unit

META_NAME = "dataset.json"
"""Name of the file; it is written last, so a folder that has it is a complete dataset."""


def instant_text(value: datetime) -> str:
    """Format an aware time as ISO 8601 in UTC with milliseconds."""
    return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_Instant = Annotated[datetime, PlainSerializer(instant_text)]
_Seconds = Annotated[timedelta, PlainSerializer(timedelta.total_seconds), Field(alias="step_seconds")]
_Channels = Annotated[
    dict[str, Channel],
    BeforeValidator(lambda value: {row["name"]: row for row in value} if isinstance(value, list) else value),
    PlainSerializer(lambda channels: [channel_as_dict(channel) for channel in channels.values()]),
]
_Sorted = PlainSerializer(lambda value: dict(sorted(value.items())))


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetMeta:
    """The content of dataset.json.

    ``schema_version``: version of the layout, see :data:`SCHEMA_VERSION` and ``RUNS_SCHEMA_VERSION``.
    ``span``: first and last observed time (aware UTC).
    ``run_days``: length of a run in days, see :class:`telemetry.dataset.layout.Runs`; None: one run per bucket.
    ``channels``: channels of the sample table in column order, including roll-ups; empty without telemetry.
    ``counts``: rows of each table (``samples``, ``events``, ``inventory``, ``jobs``), ``nodes``, ``gpus``, samples by
    bucket (``samples_by_bucket``), and counts of the import.
    ``sources``: sources of the dataset; for files, name, size and SHA-256.
    ``digest``: SHA-256 of the content, independent of paths, sources and time.
    ``files``: SHA-256 of each file in the digest, by path in the dataset; empty in datasets of older versions.
    """

    schema_version: int
    unit: Unit
    step: _Seconds
    span: tuple[_Instant, _Instant]
    buckets: int
    run_days: int | None = None
    sample_count: bool
    channels: _Channels
    counts: dict[str, Any]
    quarantine: Annotated[dict[str, int], _Sorted]
    sources: list[dict[str, Any]]
    digest: str = ""
    files: Annotated[dict[str, str], _Sorted] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Runs(self.run_days)  # raises ValueError if it is not a valid length

    @property
    def runs(self) -> Runs:
        """Partition of the dataset's time into runs."""
        return Runs(self.run_days)


_META = TypeAdapter(DatasetMeta)


def encode_meta(meta: DatasetMeta) -> bytes:
    """Return the bytes of dataset.json."""
    content = _META.dump_python(meta, by_alias=True)
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def read_meta(root: Path, named: Path | None = None) -> DatasetMeta:
    """Read dataset.json of the dataset at ``root``; ``named``: path to show in errors instead of ``root``.

    Raises ``InputError`` if there is no dataset, or dataset.json is corrupt or of an unsupported version.
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


def decode_meta(text: str, location: str) -> DatasetMeta:
    """Parse the text of a dataset.json; raises ``InputError``, with ``location``, if corrupt or unsupported."""
    advice = "Import the sources again into this folder."
    try:
        content = json.loads(text)
        version = content["schema_version"]
        if version in READ_SCHEMA_VERSIONS:
            return _META.validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise InputError(f"dataset.json is damaged: {problem}", location, advice) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"dataset.json is damaged: {error}", location, advice) from error
    raise InputError(
        f"the dataset has schema version {version}, but this predrain reads "
        f"{READ_SCHEMA_VERSIONS[0]} to {READ_SCHEMA_VERSIONS[-1]}",
        location,
        "Import the sources again, or use the version of predrain that wrote it.",
    )
