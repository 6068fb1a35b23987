"""Manifest of a bundle: content, listed files, and validation; needs no learner's library."""

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from features.config import Group
from features.vocabulary import COLUMNS, FeatureColumn
from foundation.errors import InputError
from foundation.files import previous_path
from models.calibration.fitting import Calibrator
from models.calibration.horizons import HorizonMap
from models.config import PRIOR
from models.ensembles import Stacker

FORMAT: Final = 5
"""Version of the bundle's layout; readers reject any other."""

MANIFEST: Final = "manifest.json"

SEAL: Final = "seal"
"""Manifest key of the SHA-256 of the manifest without this key, which detects modified manifests."""

SUFFIXES: Final[dict[str, str]] = {
    "lightgbm": ".txt",
    "xgboost": ".json",
    "random_forest": ".skops",
    "logistic": ".skops",
    "mlp": ".skops",
    "lstm": ".safetensors",
    "cnn1d": ".safetensors",
    PRIOR: ".txt",
}
"""File suffix by learner."""

LearnerName = Annotated[str, Field(pattern=rf"^({'|'.join(SUFFIXES)})$")]

PARTS: Final[dict[str, int]] = {"lightgbm": 1, "numpy": 1, "scikit-learn": 2, "skops": 1, "xgboost": 1}
"""Leading version parts that must match. scikit-learn's fitted attributes change between minor versions; the others
keep their formats within a major version."""

_DISTRIBUTIONS: Final[dict[str, tuple[str, ...]]] = {"xgboost": ("xgboost-cpu", "xgboost")}


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class CascadeFacts(_Facts):
    """Manifest entry of a cascade: learner names from first to last stage.

    ``shared_first``: whether the first stage is the learner of that name, stored in the same file.
    """

    stages: tuple[LearnerName, ...] = Field(min_length=1)
    shared_first: bool
    thresholds: tuple[FiniteFloat, ...]
    floor: FiniteFloat

    def file_of(self, i: int) -> str:
        """Return the file of a stage, by its number from 0."""
        name = self.stages[i]
        return learner_file(name) if i == 0 and self.shared_first else stage_file(i, name)


class FittedFacts(_Facts):
    """Manifest entry of :class:`models.training.fitted.FittedModels`; same fields, learners by name only.

    ``groups``: feature groups of each learner that does not use all columns.
    """

    refit_at: AwareDatetime
    train_start: AwareDatetime
    train_end: AwareDatetime
    span_seconds: PositiveFloat
    models: tuple[str, ...]
    k: PositiveInt
    prior_shift: FiniteFloat
    learners: tuple[LearnerName, ...]
    groups: dict[LearnerName, tuple[Group, ...]] = Field(default_factory=dict)
    members: tuple[str, ...]
    min_votes: int | None
    stacker: Stacker
    cascade: CascadeFacts | None
    baselines: dict[str, int]
    calibrators: dict[str, Calibrator]
    horizons: dict[str, HorizonMap]
    n_positive: int
    n_negative: int
    n_augmented: int
    n_incidents: int
    calibrated: bool
    thinned_to: int | None
    stand_in: str | None
    prior_weight: float | None = None

    def learner_files(self) -> tuple[str, ...]:
        """Return the files of all learners and cascade stages."""
        cascade = self.cascade
        stages = () if cascade is None else tuple(cascade.file_of(i) for i in range(len(cascade.stages)))
        return (*map(learner_file, self.learners), *stages)


def read_manifest(path: Path) -> tuple[Path, dict[str, Any], str]:
    """Read a bundle's manifest.

    Returns: the bundle's folder (``path``, or its previous version if a save was killed between its two renames), the
    manifest, and the SHA-256 of its file, which covers those of all others.
    Raises ``InputError`` if there is none, or its layout, a library's version or its seal does not match.
    """
    if not path.exists() and previous_path(path).exists():  # killed between the two renames of a save
        path = previous_path(path)
    file = path / MANIFEST
    try:
        raw = file.read_bytes()
        content = json.loads(raw)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"no bundle in {path}", str(file), "Give the folder that `predrain train` wrote.") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(file, f"is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        version = content.get("format") if isinstance(content, dict) else None
        raise InputError(
            f"the bundle's layout is version {version}, but this code reads {FORMAT}",
            str(file),
            "Train the bundle again, or use the version of predrain that wrote it.",
        )
    check_libraries(content.get("libraries"), file)
    check_seal(raw, content, file)
    return path, content, hashlib.sha256(raw).hexdigest()


def read_facts(content: Mapping[str, Any], file: Path) -> tuple[FittedFacts, tuple[FeatureColumn, ...]]:
    """Read the fitted models' entry of a manifest, and their features in order.

    Raises ``InputError`` if an entry is missing, invalid or inconsistent.
    """
    try:
        facts = FittedFacts.model_validate_json(json.dumps(content.get("fitted")))
        columns = COLUMNS.validate_python(content["features"])
        if content["profile"] not in facts.models:
            raise ValueError("profile")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        part = "fitted" if error.title == FittedFacts.__name__ else "features"
        location = ".".join(map(str, (part, *first["loc"])))
        why = first["msg"].removeprefix("Value error, ")
        raise damaged(file, f"invalid or missing: {location}: {why}") from None
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise damaged(file, f"invalid or missing: {error}") from None
    return facts, columns


def learner_file(name: str) -> str:
    """Return the path of a learner's file in a bundle."""
    return f"learners/{name}{SUFFIXES[name]}"


def stage_file(i: int, name: str) -> str:
    """Return the path of a cascade stage that is not a shared learner."""
    return f"learners/cascade-{i}-{name}{SUFFIXES[name]}"


def running_versions() -> dict[str, str]:
    """Return the version of each installed library, without importing it."""
    versions = {}
    for name in PARTS:
        for distribution in _DISTRIBUTIONS.get(name, (name,)):
            try:
                versions[name] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return versions


def check_libraries(saved: Any, manifest: Path) -> None:
    """Reject a bundle written by other library versions, or that does not name them.

    Libraries that are not installed are not compared: they cannot read anything.
    """
    running = running_versions()
    for name, parts in PARTS.items():
        wrote, installed = saved.get(name) if isinstance(saved, dict) else None, running.get(name)
        if not isinstance(wrote, str) or (
            installed is not None and wrote.split(".")[:parts] != installed.split(".")[:parts]
        ):
            raise InputError(
                f"the bundle was written with {name} {wrote}, but this is {installed}",
                str(manifest),
                f"Install {name} {'.'.join(str(wrote).split('.')[:parts])}, or train the bundle again.",
            )


def manifest_bytes(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a sealed manifest; the same content gives the same bytes."""
    bare = {key: value for key, value in content.items() if key != SEAL}
    return _encoded({**bare, SEAL: hashlib.sha256(_encoded(bare)).hexdigest()})


def check_seal(raw: bytes, content: Mapping[str, Any], file: Path) -> None:
    """Reject a manifest whose bytes differ from the saved ones."""
    try:
        is_sealed = manifest_bytes(content) == raw
    except ValueError:  # a number that JSON cannot represent
        is_sealed = False
    if not is_sealed:
        raise damaged(file, "was changed after it was saved: its digest does not match")


def read_files(path: Path, manifest: Path, listed: Any) -> dict[str, bytes]:
    """Read the files of a bundle; ``listed``: SHA-256 by relative path.

    Raises ``InputError`` if a file is missing or changed, or a path leaves the bundle.
    """
    if not isinstance(listed, Mapping):
        raise damaged(manifest, "invalid or missing: 'files'")
    for name in sorted(listed):
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts or not relative.parts or "\0" in name:
            raise damaged(manifest, f"refers to a file outside the bundle: {name}")
    contents = {}
    for name, expected in sorted(listed.items()):
        file = path / name
        try:
            content = file.read_bytes()
        except OSError:
            raise damaged(file, "is missing") from None
        if hashlib.sha256(content).hexdigest() != expected:
            raise damaged(file, "was changed after it was saved: its SHA-256 differs from the manifest's")
        contents[name] = content
    return contents


def damaged(file: Path, why: str) -> InputError:
    """Build the error for a damaged file of a bundle."""
    return InputError(f"{file.name} {why}", str(file), "Restore the bundle or train it again.")


def _encoded(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False).encode() + b"\n"
