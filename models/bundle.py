"""The bundle: everything that one refit made, as files that can be verified and read without running any of them.

``manifest.json`` names every other file with its SHA-256; ``learners/`` holds each learner in its library's own
format; ``MODEL_CARD.md`` says what the models are for, in words. Scores after loading are bit-identical to those
before saving.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import sklearn
import skops
import xgboost

from features.errors import InputError
from features.vocabulary import FeatureColumn
from models.baselines import make_baseline
from models.bundle_files import SEAL, check_seal, damaged, read_files, sealed
from models.calibration import Calibrator
from models.cascade import CascadeEnsemble
from models.config import SEQUENCE
from models.drift.reference import Reference
from models.fitted import FittedModels
from models.horizons import HorizonMap
from models.model_card import model_card
from models.native import SUFFIXES, read_learner, write_learner
from models.parallel import Stacker
from models.precedents import PrecedentLibrary
from models.sequence.extra import versions
from models.sequence.layout import window_of
from models.sequence.tabular import FirstColumns
from models.structure import check_file, check_fitted, load_checked

FORMAT = 2
"""Version of the bundle's layout; a reader refuses any other."""

MANIFEST = "manifest.json"
CARD = "MODEL_CARD.md"
PRECEDENTS = "precedents.parquet"
REFERENCE = "reference.json"

_OWN = ("format", "fitted", "files", "libraries", "features", "sequence", SEAL)

_LIBRARIES: dict[str, tuple[str, int]] = {
    # How many leading parts of the version must agree. scikit-learn's fitted attributes change between minor versions,
    # the others keep their formats within a major one.
    "lightgbm": (lightgbm.__version__, 1),
    "numpy": (np.__version__, 1),
    "scikit-learn": (sklearn.__version__, 2),
    "skops": (skops.__version__, 1),
    "xgboost": (xgboost.__version__, 1),
}


@dataclass(frozen=True, slots=True)
class Bundle:
    """A loaded bundle.

    Attributes
    ----------
    path : Path
        Where it was read from.
    fitted : FittedModels
        The models; ``fitted.score`` scores rows.
    manifest : dict
        The manifest, as it stands in the file.
    digest : str
        SHA-256 of the manifest, which holds those of all other files: it names the bundle's whole content.
    """

    path: Path
    fitted: FittedModels
    manifest: dict[str, Any]
    digest: str

    @property
    def profile(self) -> str:
        """The model whose risks are the bundle's."""
        return str(self.manifest["profile"])


def save_bundle(path: Path, fitted: FittedModels, manifest: Mapping[str, Any]) -> Bundle:
    """Write a bundle, replacing an older one as a whole or not at all.

    Parameters
    ----------
    path : Path
        The bundle's folder.
    fitted : FittedModels
        What one refit made.
    manifest : mapping
        JSON-able facts to keep: ``profile`` (required, one of ``fitted.models``), and as known ``channels``,
        ``params``, ``dataset_digest``, ``code_revision``, ``metrics``, ``simulated``. NaN becomes null. Keys of the
        layout itself (``format``, ``features``, ``sequence``, ``fitted``, ``files``, ``libraries``,
        ``seal``) are written here and may not be given.

    Returns
    -------
    Bundle
        What was written, with ``fitted`` as given. The same content gives the same bytes.

    Raises
    ------
    InputError
        If the profile is no model of ``fitted``, ``path`` holds something else, or it cannot be written.
    ValueError
        If a key of the layout is given.
    """
    taken = sorted(set(manifest) & set(_OWN))
    if taken:
        raise ValueError(f"the manifest's keys {', '.join(taken)} are written by the bundle itself")
    if manifest.get("profile") not in fitted.models:
        raise InputError(
            f"the profile '{manifest.get('profile')}' is not among the fitted models",
            "parameter models.profile",
            f"Choose one of {', '.join(fitted.models)}.",
        )
    if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not (path / MANIFEST).is_file())):
        raise InputError(f"{path} exists and is no bundle", str(path), "Choose another folder or remove it.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
        try:
            work.chmod(0o755)
            content, digest = _write(work, fitted, manifest)
            _swap(work, path)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise InputError(
            f"cannot write the bundle: {error.strerror}", str(path), "Free some space or choose another folder."
        ) from None
    return Bundle(path, fitted, content, digest)


def load_bundle(path: Path, *, columns: Sequence[FeatureColumn] | None = None) -> Bundle:
    """Read a bundle after verifying all of it.

    Parameters
    ----------
    path : Path
        The bundle's folder.
    columns : sequence of FeatureColumn, optional
        The features that rows to score will have; they must be the bundle's, in the same order.

    Returns
    -------
    Bundle
        The models, ready to score.

    Raises
    ------
    InputError
        If there is no bundle, a file is missing or was changed, a type is not trusted, a library or the layout is of
        another version, or the columns differ.
    """
    if not path.exists() and _previous(path).exists():  # killed between the two renames of a save
        path = _previous(path)
    file = path / MANIFEST
    try:
        raw = file.read_bytes()
        manifest = json.loads(raw)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"no bundle in {path}", str(file), "Give the folder that `predrain train` wrote.") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(file, f"is not JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise InputError(
            f"the bundle's layout is version {found}, this code reads {FORMAT}",
            str(file),
            "Train the bundle again, or use the version of predrain that wrote it.",
        )
    _check_libraries(manifest.get("libraries"), file)
    check_seal(raw, manifest, file)
    try:
        files = read_files(path, file, manifest["files"])
        fitted = _rebuild(manifest, files)
        if manifest["profile"] not in fitted.models:
            raise KeyError("profile")
        check_fitted(fitted)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as error:
        raise damaged(file, f"lacks or misstates {error}") from None
    if columns is not None:
        _check_columns([each.name for each in columns], [each.name for each in fitted.columns], path)
    return Bundle(path, fitted, manifest, hashlib.sha256(raw).hexdigest())


def _write(work: Path, fitted: FittedModels, manifest: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    (work / "learners").mkdir()
    for name, learner in sorted(fitted.learners.items()):
        write_learner(name, learner, work / _learner_file(name))
    if fitted.cascade is not None:
        for at, (name, stage) in enumerate(fitted.cascade.stages_):
            if not _shared(fitted, at):
                write_learner(name, stage, work / _stage_file(at, name))
    if fitted.precedents is not None:
        (work / PRECEDENTS).write_bytes(fitted.precedents.to_bytes())
    if fitted.reference is not None:
        (work / REFERENCE).write_bytes(fitted.reference.encode())
    content = {
        **_plain(manifest),
        "format": FORMAT,
        "features": [column.to_json() for column in fitted.columns],
        "sequence": None if (window := window_of(fitted.columns)) is None else window.to_json(),
        "fitted": _plain(_describe(fitted)),
        "libraries": {name: version for name, (version, _) in _LIBRARIES.items()}
        | ({} if window is None else versions()),
    }
    (work / CARD).write_text(model_card(content), encoding="utf-8", newline="\n")
    content["files"] = {
        each.relative_to(work).as_posix(): hashlib.sha256(each.read_bytes()).hexdigest()
        for each in sorted(work.rglob("*"))
        if each.is_file()
    }
    raw = sealed(content)
    (work / MANIFEST).write_bytes(raw)
    return json.loads(raw), hashlib.sha256(raw).hexdigest()


def _describe(fitted: FittedModels) -> dict[str, Any]:
    cascade = fitted.cascade
    return {
        "refit_at": fitted.refit_at.isoformat(),
        "train_start": fitted.train_start.isoformat(),
        "train_end": fitted.train_end.isoformat(),
        "span_seconds": fitted.span.total_seconds(),
        "models": fitted.models,
        "k": fitted.k,
        "prior_shift": fitted.prior_shift,
        "learners": sorted(fitted.learners),
        "members": fitted.members,
        "min_votes": fitted.min_votes,
        "stacker": {"weights": fitted.stacker.weights, "intercept": fitted.stacker.intercept},
        "cascade": None
        if cascade is None
        else {
            "stages": [name for name, _ in cascade.stages_],
            "shared_first": _shared(fitted, 0),
            "thresholds": cascade.thresholds_,
            "floor": cascade.floor_,
            "recall_floor": cascade.recall_floor,
            "order_by": cascade.order_by,
            "purge_seconds": None if cascade.purge is None else cascade.purge.total_seconds(),
        },
        "baselines": {name: baseline.seed for name, baseline in sorted(fitted.baselines.items())},
        "calibrators": {name: calibrator.to_json() for name, calibrator in sorted(fitted.calibrators.items())},
        "horizons": {name: each.to_json() for name, each in sorted(fitted.horizons.items())},
        "n_positive": fitted.n_positive,
        "n_negative": fitted.n_negative,
        "n_augmented": fitted.n_augmented,
        "n_incidents": fitted.n_incidents,
        "calibrated": fitted.calibrated,
        "stand_in": fitted.stand_in,
    }


def _rebuild(manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> FittedModels:
    said = manifest["fitted"]
    columns = tuple(FeatureColumn.from_json(each) for each in manifest["features"])
    learners = {name: _read(name, _learner_file(name), files, columns) for name in said["learners"]}
    return FittedModels(
        refit_at=_instant(said["refit_at"]),
        train_start=_instant(said["train_start"]),
        train_end=_instant(said["train_end"]),
        span=timedelta(seconds=said["span_seconds"]),
        columns=columns,
        models=tuple(said["models"]),
        k=int(said["k"]),
        prior_shift=float(said["prior_shift"]),
        learners=learners,
        members=tuple(said["members"]),
        min_votes=said["min_votes"],
        stacker=Stacker(tuple(map(float, said["stacker"]["weights"])), float(said["stacker"]["intercept"])),
        cascade=None if said["cascade"] is None else _rebuild_cascade(said["cascade"], learners, files, columns),
        baselines={name: make_baseline(name, columns=columns, seed=int(s)) for name, s in said["baselines"].items()},
        calibrators={name: Calibrator.from_json(each) for name, each in said["calibrators"].items()},
        horizons={name: HorizonMap.from_json(each) for name, each in said.get("horizons", {}).items()},
        n_positive=int(said["n_positive"]),
        n_negative=int(said["n_negative"]),
        n_augmented=int(said["n_augmented"]),
        n_incidents=int(said["n_incidents"]),
        calibrated=bool(said["calibrated"]),
        stand_in=said["stand_in"],
        precedents=PrecedentLibrary.from_bytes(files[PRECEDENTS], columns) if PRECEDENTS in files else None,
        reference=Reference.from_json(json.loads(files[REFERENCE])) if REFERENCE in files else None,
    )


def _rebuild_cascade(
    said: Mapping[str, Any],
    learners: Mapping[str, Any],
    files: Mapping[str, bytes],
    columns: tuple[FeatureColumn, ...],
) -> CascadeEnsemble:
    purge = said["purge_seconds"]
    cascade = CascadeEnsemble((), said["recall_floor"], None if purge is None else timedelta(seconds=purge))
    cascade.order_by = "mean" if said["order_by"] == "mean" else "last"
    cascade.stages_ = [
        (
            name,
            learners[name] if at == 0 and said["shared_first"] else _read(name, _stage_file(at, name), files, columns),
        )
        for at, name in enumerate(said["stages"])
    ]
    cascade.thresholds_ = [float(each) for each in said["thresholds"]]
    cascade.floor_ = float(said["floor"])
    cascade.classes_ = np.array([0, 1])
    cascade.n_features_in_ = len(columns)
    return cascade


def _shared(fitted: FittedModels, at: int) -> bool:
    """Whether a cascade's stage is one of the learners, so that one file holds both."""
    assert fitted.cascade is not None
    name, stage = fitted.cascade.stages_[at]
    return at == 0 and fitted.learners.get(name) is stage


def _learner_file(name: str) -> str:
    return f"learners/{name}{SUFFIXES[name]}"


def _stage_file(at: int, name: str) -> str:
    return f"learners/cascade-{at}-{name}{SUFFIXES[name]}"


def _read(name: str, file: str, files: Mapping[str, bytes], columns: tuple[FeatureColumn, ...]) -> Any:
    window = window_of(columns)
    features = len(columns) if window is None or name in SEQUENCE else window.tabular
    check_file(files[file], file, features)
    learner = load_checked(lambda: read_learner(name, files[file], file), file, features)
    if window is None or name in SEQUENCE:
        return learner
    return FirstColumns.around(learner, window.tabular, len(columns))


def _check_libraries(libraries: Any, file: Path) -> None:
    for name, (running, parts) in _LIBRARIES.items():
        saved = libraries.get(name) if isinstance(libraries, dict) else None
        if not isinstance(saved, str) or saved.split(".")[:parts] != running.split(".")[:parts]:
            raise InputError(
                f"the bundle was written with {name} {saved}, this is {running}",
                str(file),
                f"Install {name} {'.'.join(str(saved).split('.')[:parts])}, or train the bundle again.",
            )


def _check_columns(given: list[str], expected: list[str], path: Path) -> None:
    if given == expected:
        return
    absent = [name for name in expected if name not in set(given)]
    extra = [name for name in given if name not in set(expected)]
    parts = [f"{len(absent)} missing ({', '.join(absent[:3])})"] if absent else []
    parts += [f"{len(extra)} unknown to it ({', '.join(extra[:3])})"] if extra else []
    said = " and ".join(parts) or "the same ones in another order"
    raise InputError(
        f"the features are not those that the bundle was trained on: {said}",
        f"bundle {path}",
        "Compute features with the params that the bundle was trained with, or train it again.",
    )


def _swap(work: Path, path: Path) -> None:
    previous = _previous(path)
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.replace(path, previous)
    try:
        os.replace(work, path)
    except BaseException:
        if previous.exists() and not path.exists():
            os.replace(previous, path)
        raise
    shutil.rmtree(previous, ignore_errors=True)


def _previous(path: Path) -> Path:
    return path.parent / f".{path.name}.previous"


def _instant(text: str) -> datetime:
    when = datetime.fromisoformat(text)
    if when.tzinfo is None:
        raise ValueError(f"a time without a zone, {text}")
    return when


def _plain(value: Any) -> Any:
    """Give a value as JSON holds it: NaN as null, times in ISO form, durations in seconds."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if value is None or isinstance(value, str | int):
        return value
    raise TypeError(f"a {type(value).__name__} has no place in a manifest")
