"""Saving and loading bundles.

``manifest.json`` lists every other file with its SHA-256; ``learners/`` holds each learner in its library's own format;
``MODEL_CARD.md`` describes the models. Scores after loading are bit-identical to those before saving.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from features.config import Group
from features.vocabulary import COLUMNS, FeatureColumn
from foundation.errors import InputError
from foundation.files import FolderSwap, disk_errors, fsync_path, refuse_other_content
from models.bundle.manifest import (
    FORMAT,
    MANIFEST,
    SEAL,
    CascadeFacts,
    FittedFacts,
    damaged,
    learner_file,
    manifest_bytes,
    read_facts,
    read_files,
    read_manifest,
    running_versions,
    stage_file,
)
from models.bundle.model_card import model_card
from models.bundle.serialization import read_learner, write_learner
from models.config import PRIOR, SEQUENCE
from models.ensembles import Cascade
from models.learners.baselines import make_baseline
from models.learners.prepared import ColumnSubset, seen_columns
from models.sequence.layout import versions, window_of
from models.training.fitted import FittedModels
from models.training.reference import Reference

CARD = "MODEL_CARD.md"
REFERENCE = "reference.json"

_SAME = (
    "refit_at", "train_start", "train_end", "models", "k", "prior_shift", "members", "min_votes", "stacker",
    "n_positive", "n_negative", "n_augmented", "n_incidents", "calibrated", "thinned_to", "stand_in",
    "prior_weight",
)  # fmt: skip
"""Fields that fitted models and manifest share."""

_RESERVED = ("format", "fitted", "files", "libraries", "features", "sequence", SEAL)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A loaded bundle.

    ``digest``: SHA-256 of the manifest, which covers all other files: it identifies the bundle's whole content.
    """

    path: Path
    fitted: FittedModels
    manifest: dict[str, Any]
    digest: str

    @property
    def profile(self) -> str:
        """Model whose risks the bundle reports."""
        return str(self.manifest["profile"])

    @property
    def columns(self) -> tuple[FeatureColumn, ...]:
        """Features, in order."""
        return self.fitted.columns


def save_bundle(path: Path, fitted: FittedModels, manifest: Mapping[str, Any]) -> Bundle:
    """Write a bundle, atomically replacing an older one.

    ``manifest``: JSON-serializable metadata: ``profile`` (required, one of ``fitted.models``), and, if known,
    ``channels``, ``params``, ``dataset_digest``, ``code_revision``, ``metrics``, ``simulated``, ``search``. NaN becomes
    null. Keys of the layout (``format``, ``features``, ``sequence``, ``fitted``, ``files``, ``libraries``, ``seal``)
    are reserved.
    Returns: the written bundle, with ``fitted`` as given. The same content gives the same bytes.
    Raises ``InputError`` if the profile is no model of ``fitted``, ``path`` holds something else, or it cannot be
    written.
    Raises ``ValueError`` if a reserved key is given.
    """
    conflicting = sorted(set(manifest) & set(_RESERVED))
    if conflicting:
        raise ValueError(f"the manifest's keys {', '.join(conflicting)} are written by the bundle itself")
    if manifest.get("profile") not in fitted.models:
        raise InputError(
            f"the profile '{manifest.get('profile')}' is not among the fitted models",
            "parameter models.profile",
            f"Choose one of {', '.join(fitted.models)}.",
        )
    refuse_other_content(path, MANIFEST, "a bundle")
    with FolderSwap(path) as swap, disk_errors(path):
        content, digest = _write(swap.path, fitted, manifest)
        for file in swap.path.rglob("*"):  # a crash after the renames must not leave empty files
            fsync_path(file)
        swap.commit()
    return Bundle(path, fitted, content, digest)


def load_bundle(path: Path) -> Bundle:
    """Load a bundle after verifying all of its files.

    Raises ``InputError`` if there is no bundle, a file is missing or was changed, a type is not trusted, or the version
    of a library or the layout does not match.
    """
    folder, content, digest = read_manifest(path)
    files = read_files(folder, folder / MANIFEST, content.get("files"))
    facts, columns = read_facts(content, folder / MANIFEST)
    for name in facts.learner_files():
        if name not in files:
            raise damaged(folder / name, "is missing from the manifest")
    return Bundle(folder, _rebuild(facts, columns, files), content, digest)


def _write(work: Path, fitted: FittedModels, manifest: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    (work / "learners").mkdir()
    for name, learner in sorted(fitted.learners.items()):
        write_learner(name, learner, work / learner_file(name))
    if fitted.cascade is not None:
        for i, (name, stage) in enumerate(fitted.cascade.stages):
            if not _shared(fitted, i):
                write_learner(name, stage, work / stage_file(i, name))
    if fitted.reference is not None:
        (work / REFERENCE).write_bytes(fitted.reference.encode())
    content = {
        **_plain(manifest),
        "format": FORMAT,
        "features": COLUMNS.dump_python(fitted.columns, mode="json"),
        "sequence": None if (window := window_of(fitted.columns)) is None else window.to_json(),
        "fitted": _facts_of(fitted).model_dump(mode="json"),
        "libraries": running_versions() | ({} if window is None else versions()),
    }
    (work / CARD).write_text(model_card(content), encoding="utf-8", newline="\n")
    content["files"] = {
        path.relative_to(work).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(work.rglob("*"))
        if path.is_file()
    }
    raw = manifest_bytes(content)
    (work / MANIFEST).write_bytes(raw)
    return json.loads(raw), hashlib.sha256(raw).hexdigest()


def _facts_of(fitted: FittedModels) -> FittedFacts:
    cascade = fitted.cascade
    learners = [*fitted.learners.items(), *(cascade.stages if cascade else ())]
    return FittedFacts(
        **{name: getattr(fitted, name) for name in _SAME},
        calibrators=dict(fitted.calibrators),
        horizons=dict(fitted.horizons),
        span_seconds=fitted.span.total_seconds(),
        learners=tuple(sorted(fitted.learners)),
        groups={
            name: tuple(dict.fromkeys(fitted.columns[i].group for i in learner.columns))
            for name, learner in learners
            if isinstance(learner, ColumnSubset)
        },
        baselines={name: baseline.seed for name, baseline in fitted.baselines.items()},
        cascade=None
        if cascade is None
        else CascadeFacts(
            stages=tuple(name for name, _ in cascade.stages),
            shared_first=_shared(fitted, 0),
            thresholds=tuple(cascade.thresholds),
            floor=cascade.floor,
        ),
    )


def _rebuild(facts: FittedFacts, columns: tuple[FeatureColumn, ...], files: Mapping[str, bytes]) -> FittedModels:
    def read(name: str, file: str) -> Any:
        return _read(name, file, files, columns, facts.groups.get(name))

    learners = {name: read(name, learner_file(name)) for name in facts.learners}
    return FittedModels(
        **{name: getattr(facts, name) for name in _SAME},
        calibrators=facts.calibrators,
        horizons=facts.horizons,
        span=timedelta(seconds=facts.span_seconds),
        columns=columns,
        learners=learners,
        cascade=None if facts.cascade is None else _rebuild_cascade(facts.cascade, learners, read),
        baselines={name: make_baseline(name, columns=columns, seed=seed) for name, seed in facts.baselines.items()},
        reference=_reference(files[REFERENCE]) if REFERENCE in files else None,
    )


def _reference(content: bytes) -> Reference:
    try:
        return Reference.decode(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        location = ".".join(map(str, first["loc"]))
        raise damaged(Path(REFERENCE), f"invalid or missing: {location}: {first['msg']}") from None


def _rebuild_cascade(facts: CascadeFacts, learners: Mapping[str, Any], read: Callable[[str, str], Any]) -> Cascade:
    stages = [
        (name, learners[name] if i == 0 and facts.shared_first else read(name, facts.file_of(i)))
        for i, name in enumerate(facts.stages)
    ]
    return Cascade(stages, facts.thresholds, facts.floor)


def _shared(fitted: FittedModels, i: int) -> bool:
    """Return whether a cascade's stage is one of the learners, stored in the same file."""
    assert fitted.cascade is not None
    name, stage = fitted.cascade.stages[i]
    return i == 0 and fitted.learners.get(name) is stage


def _read(
    name: str,
    file: str,
    files: Mapping[str, bytes],
    columns: tuple[FeatureColumn, ...],
    groups: Sequence[Group] | None,
) -> Any:
    if name in (*SEQUENCE, PRIOR):
        return read_learner(name, files[file], file, len(columns))
    used_columns = seen_columns(columns, groups)
    learner = read_learner(name, files[file], file, len(used_columns))
    return learner if len(used_columns) == len(columns) else ColumnSubset.around(learner, used_columns)


def _plain(value: Any) -> Any:
    """Return a JSON-compatible value: NaN as null, times in ISO format, durations in seconds."""
    return from_json(to_json(value, inf_nan_mode="null", timedelta_mode="float", fallback=lambda number: number.item()))
