"""Metadata of a feature matrix: the content of its matrix.json, and the names of its files and key columns."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from features.config import DecisionSection, FeatureSection, LabelSection
from features.vocabulary import FeatureColumn
from foundation.durations import Duration
from foundation.errors import InputError
from telemetry.dataset.channels import Channel
from telemetry.dataset.schema import Unit

MATRIX_SCHEMA_VERSION = 3
"""Version of the folder layout."""

META_NAME = "matrix.json"
"""Metadata file; written last, so its presence marks a complete matrix."""

EVENTS_NAME, INVENTORY_NAME = "events.parquet", "inventory.parquet"
"""Names of the files with the dataset's events and inventory."""

ROW_COLUMNS = ("decision_time", "node", "gpu", "unit", "augmented", "established_at")
"""Key columns of the rows."""

ACTED_ON = "acted_on"
"""Column of rows and predictions with the target of an action, if that is not the node."""


@dataclass(frozen=True, slots=True)
class MatrixConfig:
    """Settings that a matrix was built with; enough to compute live rows with the same columns.

    ``augmentation``, ``negative_ratio``: ``training.augmentation`` and ``training.negative_ratio``, which determine the
    augmented rows.
    ``span``: first and last instant in the dataset, aware UTC.
    ``columns``: in order; categorical columns include their categories.
    ``sources``: origin of the dataset, as in its dataset.json; includes whether the fleet is simulated.
    """

    decision: DecisionSection
    labels: LabelSection
    features: FeatureSection
    augmentation: int
    negative_ratio: int
    seed: int
    unit: Unit
    step: Duration
    span: tuple[datetime, datetime]
    channels: Mapping[str, Channel]
    columns: tuple[FeatureColumn, ...]
    dataset_digest: str
    sources: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """A file of rows.

    ``file``: name, with the start of its time span.
    ``established``: latest ``decision_time`` or ``established_at`` of its rows; aware.
    """

    file: str
    rows: int
    augmented: int
    established: datetime


@dataclass(frozen=True, slots=True)
class MatrixMeta:
    """The content of matrix.json.

    ``digest``: SHA-256 of everything the matrix depends on: dataset content, settings and the code of this package.
    ``counts``: ``rows``, ``augmented`` and ``features``.
    """

    digest: str
    config: MatrixConfig
    counts: dict[str, int]
    parts: tuple[MatrixPart, ...] = ()
    schema_version: int = MATRIX_SCHEMA_VERSION

    def encode(self) -> bytes:
        """Return the bytes of matrix.json."""
        return _META.dump_json(self, indent=1) + b"\n"


_META = TypeAdapter(MatrixMeta)


def read_meta(path: Path) -> MatrixMeta:
    """Read the matrix.json of the matrix at ``path``.

    Raises ``InputError`` if there is no matrix, or its matrix.json is damaged or of another version.
    """
    file = path / META_NAME
    advice = "Check the path, or compute the matrix again: `predrain features` or `dvc repro features`."
    try:
        content = file.read_bytes()
        version = json.loads(content).get("schema_version")
        if version == MATRIX_SCHEMA_VERSION:
            return _META.validate_json(content)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError("not a feature matrix: it has no matrix.json", str(path), advice) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        location = ".".join(map(str, first["loc"]))
        raise InputError(f"matrix.json is damaged: {location}: {first['msg']}", str(file), advice) from error
    except (ValueError, AttributeError) as error:
        raise InputError(f"matrix.json is damaged: {error}", str(file), advice) from error
    raise InputError(
        f"the matrix has schema version {version}, but this predrain reads {MATRIX_SCHEMA_VERSION}", str(file), advice
    )
