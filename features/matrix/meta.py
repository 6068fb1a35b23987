"""What a feature matrix says of itself: the content of its matrix.json, and the names of its files and key columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from features.config import DecisionSection, FeatureSection, LabelSection
from features.errors import InputError
from features.times import UnitKind
from features.vocabulary import FeatureColumn
from telemetry.dataset.channel import Channel, channel_as_dict, channel_from_dict

MATRIX_SCHEMA_VERSION = 2
"""Version of the folder's layout."""

META_NAME = "matrix.json"
"""Name of the file that makes a folder a whole matrix."""

EVENTS_NAME, INVENTORY_NAME = "events.parquet", "inventory.parquet"
"""Names of the files with the dataset's events and inventory."""

ROW_COLUMNS = ("decision_time", "node", "gpu", "unit", "augmented", "established_at")
"""Key columns of the rows."""


@dataclass(frozen=True, slots=True)
class MatrixConfig:
    """What a matrix was made with: enough to compute a live row with the same columns.

    ``augmentation``, ``negative_ratio``: ``training.augmentation`` and ``training.negative_ratio``, which decide the
    augmented rows.
    ``unit``: ``gpu`` or ``node``.
    ``span``: first and last instant of anything in the dataset, aware UTC.
    ``columns``: the columns, in order; categorical ones hold their table of codes.
    ``sources``: where the dataset came from, as its dataset.json says; a simulated fleet says so here.
    """

    decision: DecisionSection
    labels: LabelSection
    features: FeatureSection
    augmentation: int
    negative_ratio: int
    seed: int
    unit: UnitKind
    step: timedelta
    span: tuple[datetime, datetime]
    channels: Mapping[str, Channel]
    columns: tuple[FeatureColumn, ...]
    dataset_digest: str
    sources: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Give the configuration as a JSON object."""
        return {
            "dataset_digest": self.dataset_digest,
            "sources": [dict(source) for source in self.sources],
            "unit": self.unit,
            "step_seconds": self.step.total_seconds(),
            "span": [instant.astimezone(UTC).isoformat() for instant in self.span],
            "decision": self.decision.model_dump(mode="json"),
            "labels": self.labels.model_dump(mode="json"),
            "features": self.features.model_dump(mode="json"),
            "training": {"augmentation": self.augmentation, "negative_ratio": self.negative_ratio},
            "seed": self.seed,
            "channels": [channel_as_dict(channel) for channel in self.channels.values()],
            "columns": [column.to_json() for column in self.columns],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> MatrixConfig:
        """Read what :meth:`to_json` wrote."""
        channels = [channel_from_dict(each) for each in content["channels"]]
        first, last = (datetime.fromisoformat(each) for each in content["span"])
        return cls(
            decision=DecisionSection.model_validate(content["decision"]),
            labels=LabelSection.model_validate(content["labels"]),
            features=FeatureSection.model_validate(content["features"]),
            augmentation=content["training"]["augmentation"],
            negative_ratio=content["training"]["negative_ratio"],
            seed=content["seed"],
            unit=content["unit"],
            step=timedelta(seconds=content["step_seconds"]),
            span=(first, last),
            channels={channel.name: channel for channel in channels},
            columns=tuple(FeatureColumn.from_json(each) for each in content["columns"]),
            dataset_digest=content["dataset_digest"],
            sources=tuple(content["sources"]),
        )


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """A file of rows.

    ``file``: named by the decision time at which its rows begin, see :func:`features.matrix.slabs.part_name`.
    ``established``: when the last of them was decided or, if that was later, established; aware.
    """

    file: str
    rows: int
    augmented: int
    established: datetime


@dataclass(frozen=True, slots=True)
class MatrixMeta:
    """The content of matrix.json.

    ``digest``: SHA-256 over what the matrix is a function of: the dataset's content, the settings and this room's code.
    ``counts``: ``rows``, ``augmented`` and ``features``.
    ``parts``: files in order of time.
    """

    digest: str
    config: MatrixConfig
    counts: dict[str, int]
    parts: tuple[MatrixPart, ...] = field(default=())

    def encode(self) -> bytes:
        """Return the bytes of matrix.json."""
        content = {
            "schema_version": MATRIX_SCHEMA_VERSION,
            "digest": self.digest,
            "counts": self.counts,
            "parts": [{**asdict(part), "established": part.established.isoformat()} for part in self.parts],
            **self.config.to_json(),
        }
        return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def read_meta(path: Path) -> MatrixMeta:
    """Read matrix.json of the matrix at ``path``.

    Raises ``InputError`` if there is no matrix, or its matrix.json cannot be used.
    """
    file = path / META_NAME
    again = "Run the features stage again: `predrain features` or `dvc repro features`."
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        version = content["schema_version"]
        if version == MATRIX_SCHEMA_VERSION:
            parts = tuple(
                MatrixPart(**{**part, "established": datetime.fromisoformat(part["established"])})
                for part in content["parts"]
            )
            return MatrixMeta(content["digest"], MatrixConfig.from_json(content), content["counts"], parts)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError("not a feature matrix: it has no matrix.json", str(path), again) from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"matrix.json is damaged: {error}", str(file), again) from error
    raise InputError(
        f"the matrix has schema version {version}, this predrain reads {MATRIX_SCHEMA_VERSION}", str(file), again
    )
