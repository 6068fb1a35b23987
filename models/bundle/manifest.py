"""The manifest of a bundle: read, verified and understood without the libraries that train."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal

from features.errors import InputError
from features.vocabulary import FeatureColumn
from models.bundle.files import check_seal, damaged
from models.bundle.library_versions import check_libraries
from models.calibrator import Calibrator
from models.combining import Stacker
from models.config import CASCADE, COMBINERS
from models.horizon_map import HorizonMap

FORMAT: Final = 3
"""Version of the bundle's layout; a reader refuses any other."""

MANIFEST: Final = "manifest.json"

SUFFIXES: Final[dict[str, str]] = {
    "lightgbm": ".txt",
    "xgboost": ".json",
    "random_forest": ".skops",
    "logistic": ".skops",
    "mlp": ".skops",
    "lstm": ".safetensors",
    "cnn1d": ".safetensors",
}
"""Suffix of a learner's file, by learner."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest whose seal, layout and libraries fit.

    ``content``: the manifest, as it stands in the file.
    ``digest``: SHA-256 of the file, which holds those of all others: it names the bundle's whole content.
    """

    path: Path
    content: dict[str, Any]
    digest: str

    @property
    def file(self) -> Path:
        """Where it stands."""
        return self.path / MANIFEST

    @property
    def profile(self) -> str:
        """The model whose risks are the bundle's."""
        return str(self.content["profile"])


@dataclass(frozen=True, slots=True)
class CascadeFacts:
    """What a manifest says of a cascade.

    ``stages``: learners from first to last.
    ``shared_first``: whether the first stage is the learner of that name, so that one file holds both.
    ``thresholds``: one for each stage but the last.
    ``floor``, ``recall_floor``: see :class:`models.cascade.CascadeEnsemble`.
    ``order_by``: ``last`` or ``mean``.
    """

    stages: tuple[str, ...]
    shared_first: bool
    thresholds: tuple[float, ...]
    floor: float
    recall_floor: float
    order_by: Literal["last", "mean"]
    purge: timedelta | None

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> CascadeFacts:
        """Read what a manifest says."""
        return cls(
            stages=tuple(said["stages"]),
            shared_first=bool(said["shared_first"]),
            thresholds=tuple(map(float, said["thresholds"])),
            floor=float(said["floor"]),
            recall_floor=said["recall_floor"],
            order_by="mean" if said["order_by"] == "mean" else "last",
            purge=None if said["purge_seconds"] is None else timedelta(seconds=said["purge_seconds"]),
        )

    def file_of(self, at: int) -> str:
        """Name the file of a stage, by its number from 0."""
        name = self.stages[at]
        return learner_file(name) if at == 0 and self.shared_first else stage_file(at, name)


@dataclass(frozen=True, slots=True)
class FittedFacts:
    """What a manifest says of :class:`models.fitted.FittedModels`; attributes as there, learners by name only.

    ``learners``: learners that have a file.
    """

    refit_at: datetime
    train_start: datetime
    train_end: datetime
    span: timedelta
    columns: tuple[FeatureColumn, ...]
    models: tuple[str, ...]
    k: int
    prior_shift: float
    learners: tuple[str, ...]
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

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> FittedFacts:
        """Read a whole manifest's content.

        Raises ``KeyError, TypeError, ValueError, AttributeError, OverflowError`` if it lacks or misstates something;
        see :func:`misstated`.
        """
        said = content["fitted"]
        columns = tuple(FeatureColumn.from_json(each) for each in content["features"])
        for name in said["learners"]:
            learner_file(name)
        return cls(
            refit_at=_instant(said["refit_at"]),
            train_start=_instant(said["train_start"]),
            train_end=_instant(said["train_end"]),
            span=timedelta(seconds=said["span_seconds"]),
            columns=columns,
            models=tuple(said["models"]),
            k=int(said["k"]),
            prior_shift=float(said["prior_shift"]),
            learners=tuple(said["learners"]),
            members=tuple(said["members"]),
            min_votes=said["min_votes"],
            stacker=Stacker(tuple(map(float, said["stacker"]["weights"])), float(said["stacker"]["intercept"])),
            cascade=None if said["cascade"] is None else CascadeFacts.from_json(said["cascade"]),
            baselines={name: int(seed) for name, seed in said["baselines"].items()},
            calibrators={name: Calibrator.from_json(each) for name, each in said["calibrators"].items()},
            horizons={name: HorizonMap.from_json(each) for name, each in said.get("horizons", {}).items()},
            n_positive=int(said["n_positive"]),
            n_negative=int(said["n_negative"]),
            n_augmented=int(said["n_augmented"]),
            n_incidents=int(said["n_incidents"]),
            calibrated=bool(said["calibrated"]),
            thinned_to=said.get("thinned_to"),
            stand_in=said["stand_in"],
        )

    def for_profile(self, profile: str) -> FittedFacts:
        """Give the facts without the models, learners and baselines that the profile does not need."""
        baselines = {name: seed for name, seed in self.baselines.items() if name in (profile, self.stand_in)}
        cascade = None
        needed: tuple[str, ...] = ()
        if profile not in self.baselines and self.stand_in is None:
            cascade = self.cascade if profile == CASCADE else None
            needed = self.members if profile in COMBINERS else (profile,) if cascade is None else cascade.stages[:1]
        learners = tuple(name for name in self.learners if name in needed)
        return replace(self, models=(profile,), learners=learners, baselines=baselines, cascade=cascade)

    def learners_files(self) -> tuple[str, ...]:
        """Name the files of all learners and of the cascade's stages."""
        cascade = self.cascade
        stages = () if cascade is None else tuple(cascade.file_of(at) for at in range(len(cascade.stages)))
        return (*map(learner_file, self.learners), *stages)


def read_manifest(path: Path) -> Manifest:
    """Read a bundle's manifest.

    Returns: ``path`` may be that of the bundle before, where a save was killed between its two renames.
    Raises ``InputError`` if there is none, or its layout, a library's version or its seal does not fit.
    """
    if not path.exists() and previous(path).exists():  # killed between the two renames of a save
        path = previous(path)
    file = path / MANIFEST
    try:
        raw = file.read_bytes()
        content = json.loads(raw)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"no bundle in {path}", str(file), "Give the folder that `predrain train` wrote.") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(file, f"is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise InputError(
            f"the bundle's layout is version {found}, this code reads {FORMAT}",
            str(file),
            "Train the bundle again, or use the version of predrain that wrote it.",
        )
    check_libraries(content.get("libraries"), file)
    check_seal(raw, content, file)
    return Manifest(path, content, hashlib.sha256(raw).hexdigest())


@contextlib.contextmanager
def misstated(manifest: Manifest) -> Iterator[None]:
    """Turn what reading a manifest's content raises into an InputError that names what it lacks or misstates."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as error:
        raise damaged(manifest.file, f"lacks or misstates {error}") from None


def check_columns(given: Sequence[FeatureColumn], expected: Sequence[FeatureColumn], path: Path) -> None:
    """Refuse rows of other features than the bundle's, or in another order.

    Raises ``InputError``: naming what differs.
    """
    names, wanted = [each.name for each in given], [each.name for each in expected]
    if names == wanted:
        return
    absent = [name for name in wanted if name not in set(names)]
    extra = [name for name in names if name not in set(wanted)]
    parts = [f"{len(absent)} missing ({', '.join(absent[:3])})"] if absent else []
    parts += [f"{len(extra)} unknown to it ({', '.join(extra[:3])})"] if extra else []
    said = " and ".join(parts) or "the same ones in another order"
    raise InputError(
        f"the features are not those that the bundle was trained on: {said}",
        f"bundle {path}",
        "Compute features with the params that the bundle was trained with, or train it again.",
    )


def learner_file(name: str) -> str:
    """Name a learner's file inside a bundle."""
    return f"learners/{name}{SUFFIXES[name]}"


def stage_file(at: int, name: str) -> str:
    """Name the file of a cascade's stage that is no learner of its own."""
    return f"learners/cascade-{at}-{name}{SUFFIXES[name]}"


def file_features(name: str, features: int) -> int:
    """Give how many features a learner's trees look at: hazards have the number of the interval as one more."""
    return features + 1 if name.endswith("_hazard") else features


def previous(path: Path) -> Path:
    """Give where a bundle stands while a new one takes its place."""
    return path.parent / f".{path.name}.previous"


def _instant(text: str) -> datetime:
    when = datetime.fromisoformat(text)
    if when.tzinfo is None:
        raise ValueError(f"a time without a zone, {text}")
    return when
