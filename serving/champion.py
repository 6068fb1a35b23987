"""Loads the bundle to score with, from a folder or a local copy of the registry's champion.

:class:`ModelHolder` holds the service's model and swaps it atomically; its thread also polls the registry.
:class:`ModelSource` loads the model of batch scoring at each decision. MLflow is only imported for a champion.
"""

import atexit
import hashlib
import logging
import math
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from foundation.errors import InputError, TooEarlyError
from foundation.files import (
    FolderSwap,
    disk_errors,
    fsync_path,
    recover_folder,
    refuse_other_writers,
    stamp_of,
    take_lock,
)
from foundation.running import Poller

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from models.bundle.store import Bundle
    from serving.scores.batch import ServedModel

_LOG = logging.getLogger(__name__)
MANIFEST: Final = "manifest.json"


@dataclass(frozen=True, slots=True)
class ResolvedBundle:
    """The bundle that a source resolves to.

    ``version``: registry version; None for a bundle from a folder.
    ``note``: why it may be outdated; None: no known reason.
    """

    path: Path
    version: int | None = None
    note: str | None = None


class FolderBundle:
    """Source of the bundle to serve: a local folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def poll(self) -> None:
        """Fetch a newer bundle if there is one; a no-op for a folder."""

    def stamp(self) -> object:
        """Return a value that changes with the bundle; cheap enough to poll every second."""
        return stamp_of(self.path / MANIFEST)

    def resolve(self) -> ResolvedBundle:
        """Return the current bundle; raises ``InputError`` if there is none."""
        return ResolvedBundle(self.path)


def manifest_digest(bundle: Path) -> str:
    """Return the SHA-256 of a bundle's manifest; empty if it is unreadable, which loading then reports."""
    try:
        return hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return ""


CHAMPION: Final = "champion"
"""Model argument that selects the registry's champion instead of a folder."""


class ChampionBundle(FolderBundle):
    """Local copy of the champion of a registered model: ``bundle/``, with its registry version in the file ``version``.

    ``folder``: an existing copy is used until the registry responds.
    ``every_s``: minimum time between two requests to the registry.
    ``error``: failure of the last request, if any.
    """

    def __init__(self, folder: Path, registry: str, name: str, every_s: float = 0.0) -> None:
        super().__init__(folder)
        self.bundle = folder / "bundle"
        self.error: Exception | None = None
        self._registry, self._name, self._every_s = registry, name, every_s
        self._polled_s = -math.inf if self.version() is None else None
        self._is_fetched = False

    def stamp(self) -> object:
        """Return a value that changes with the champion's version and the state of the registry."""
        return stamp_of(self.bundle / MANIFEST), self.version(), str(self.error)

    def poll(self) -> None:
        """Update the copy if the champion has changed; a failure is stored in ``error``."""
        now_s = time.monotonic()
        if self._polled_s is None:  # an unresponsive registry must not delay the loading of an existing copy
            self._polled_s = -math.inf
            return
        if now_s - self._polled_s < self._every_s:
            return
        self._polled_s, self.error = now_s, None
        try:
            self._fetch()
            self._is_fetched = True
        except Exception as error:  # may be transient: a registry restart, a full disk
            self.error = error

    def resolve(self) -> ResolvedBundle:
        """Return the champion's bundle; raises ``InputError`` if there is no copy, ``TooEarlyError`` if no champion."""
        version, error = self.version(), self.error
        cause = str(error).partition("\n")[0] or type(error).__name__
        note = None if error is None else f"cannot update the champion: {cause}"
        if version is not None:
            return ResolvedBundle(self.bundle, version, note)
        if isinstance(error, InputError):
            raise error
        raise InputError(
            note or "the local copy of the champion is missing",
            str(self.bundle),
            "Wait for the next attempt to fetch it.",
        )

    def version(self) -> int | None:
        """Read the registry version of the copy; None if there is no copy."""
        try:
            return int((self.bundle / "version").read_text())
        except (OSError, ValueError):
            return None

    def take(self, bundle: Path, version: int) -> None:
        """Replace the bundle with a copy of another one; raises ``InputError`` if the disk is full."""
        with FolderSwap(self.bundle) as swap, disk_errors(self.path):
            shutil.copytree(bundle, swap.path, dirs_exist_ok=True)
            (swap.path / "version").write_text(str(version))
            for path in swap.path.rglob("*"):
                fsync_path(path)
            swap.commit()

    def _fetch(self) -> None:
        """Fetch the champion if it changed; the first call always does, to repair the copy."""
        # By default MLflow waits many minutes for an unresponsive registry. It also takes seconds to import.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        from models.registry.champion import champion_history, fetch_bundle, version_at

        history = champion_history(self._registry, self._name)
        history.refuse_unseated(self._name)
        number = history.champion
        if number is None:
            raise TooEarlyError(
                "there is no champion yet",
                f"model {self._name}, {self._registry}",
                "`predrain retrain` makes the first one; or give the folder of a bundle.",
            )
        version = version_at(self._registry, self._name, number)
        if self._is_fetched and (self.version(), manifest_digest(self.bundle)) == (number, version.digest):
            return
        with tempfile.TemporaryDirectory(prefix="predrain-champion-") as folder:
            self.take(fetch_bundle(self._registry, self._name, version, Path(folder)), number)


def temporary_folder() -> Path:
    """Create a temporary folder that is deleted when the process exits."""
    folder = Path(tempfile.mkdtemp(prefix="predrain-champion-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def locked_folder(state: Path) -> Path:
    """Lock the state folder until the process exits, and return the champion's folder in it, which outlives restarts.

    Raises ``InputError`` if another process holds the lock, or the folder is not writable.
    """
    with disk_errors(state):
        if state.exists() and not state.is_dir():
            raise InputError("the path is a file", str(state), "Choose another folder.")
        state.mkdir(parents=True, exist_ok=True)
    advice = "Stop it, or give each service its own --state."
    lock = take_lock(state / "lock", "another predrain serve uses this folder", str(state), advice).lock
    atexit.register(lock.release)  # this reference also keeps the lock from being garbage-collected
    folder = state / "champion"
    recover_folder(folder / "bundle")  # a process may have been killed while replacing it
    return folder


class ModelSource:
    """Loads the bundle for batch scoring, and reloads it when it changes.

    ``model``: a bundle's folder, or :data:`CHAMPION` for the champion of the registered model ``name`` (write a folder
    of that name as ``./champion``).
    """

    def __init__(self, model: str, *, registry: str, name: str) -> None:
        is_champion = model == CHAMPION
        self._source = ChampionBundle(temporary_folder(), registry, name) if is_champion else FolderBundle(Path(model))
        self._loaded: ServedModel | None = None

    def current(self) -> "ServedModel":
        """Return the current model, or the previous one if the current one cannot be loaded.

        Raises ``InputError`` if there is no previous one either.
        """
        from models.bundle.store import load_bundle  # takes seconds to import
        from serving.scores.batch import ServedModel

        loaded = self._loaded
        self._source.poll()
        try:
            new = self._source.resolve()
            if loaded is None or loaded.version != new.version or loaded.bundle.digest != manifest_digest(new.path):
                bundle = load_bundle(new.path)
                refuse_other_writers(bundle.path, [bundle.path / MANIFEST])  # it holds all other files' digests
                self._loaded = loaded = ServedModel(bundle, new.version)
        except InputError as error:
            if loaded is None:
                raise
            return replace(loaded, note=f"the current model stays in use: {error}")
        return loaded if new.note is None else replace(loaded, note=new.note)


_RETRY_POLLS = 10
_NO_STAMP = object()


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Rows ready to score.

    ``values``: features in the model's order; NaN: missing; shape (n_rows, n_features).
    ``units``: names from the request; default: row numbers from 0.
    ``times``: decision times in milliseconds since the epoch (UTC); 0 if there are none; shape (n_rows,).
    """

    values: "npt.NDArray[np.float32]"
    units: list[str]
    times: "npt.NDArray[np.int64]"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A bundle that is ready to score; ``columns``: its feature names, in order."""

    bundle: "Bundle"
    columns: tuple[str, ...]
    version: str | None
    horizon_seconds: float | None

    def about(self) -> dict[str, Any]:
        """Return the model's fields in responses."""
        return {"digest": self.bundle.digest, "profile": self.bundle.profile, "version": self.version}

    def score(self, rows: FeatureRows) -> list[dict[str, Any]]:
        """Return ``unit``, ``risk``, ``score``, ``rank`` and ``alert`` of each row.

        Ranks and alerts are computed within each decision time.
        """
        from models.rows.ranking import text_hashes

        fitted, profile = self.bundle.fitted, self.bundle.profile
        unit = text_hashes(rows.units)  # the node is unknown: each unit is its own node
        scored = fitted.score_arrays(rows.values, rows.times, unit, unit)[profile]
        columns = (rows.units, fitted.risk(profile, scored.score), scored.score, scored.rank, scored.alert)
        return [
            {"unit": unit, "risk": float(risk), "score": float(score), "rank": int(rank), "alert": bool(alert)}
            for unit, risk, score, rank, alert in zip(*columns, strict=True)
        ]


class ModelHolder:
    """Loads the bundle of a source in a thread, and reloads it whenever it changes.

    ``source``: a bundle's folder, or another source; None: rows are not scored.
    ``model``: immutable; None: not loaded. Read it once per request, so that the request ends with the same model.
    ``refused``: why the source's current bundle was rejected or is unknown; the previous model stays in use.
    """

    def __init__(self, source: Path | FolderBundle | None, poll_s: float = 1.0) -> None:
        self.has_source = source is not None
        self.model: LoadedModel | None = None
        self.why_not_loaded: str | None = "the model is being loaded" if self.has_source else None
        self.refused: str | None = None
        self.loads = 0
        self.refusals = 0
        self._source = FolderBundle(source) if isinstance(source, Path) else source
        self._poller = Poller("model", self.refresh, poll_s)
        self._last_stamp: object = _NO_STAMP
        self._polls_to_retry = 0

    def start(self) -> None:
        """Start the thread, which loads the first model immediately."""
        if self._source is not None:
            self._poller.start()

    def stop(self) -> None:
        """Stop the thread; wait at most 5 s for the registry."""
        self._poller.stop()

    def refresh(self) -> bool:
        """Load the bundle if it has changed since the last poll.

        Returns: whether another model is served now. A bundle that cannot be loaded is only reported, and retried
        when it changes or after ten polls, because the folder may be half-written.
        """
        assert self._source is not None
        self._source.poll()
        stamp = self._source.stamp()
        self._polls_to_retry -= 1
        if stamp == self._last_stamp and (self.refused is None or self._polls_to_retry > 0):
            return False
        self._last_stamp, self._polls_to_retry = stamp, _RETRY_POLLS
        try:
            new = self._source.resolve()
            current = self.model
            same_version = current is not None and (new.version is None or current.version == str(new.version))
            if current is not None and same_version and current.bundle.digest == manifest_digest(new.path):
                self._report(new.note)
                return False
            model = load_model(new.path, version=new.version)
        except InputError as error:
            self._refuse(str(error))
            return False
        except Exception as error:  # reported by /readyz; the thread must survive to load the next one
            _LOG.exception("the model cannot be loaded")
            self._refuse(type(error).__name__)
            return False
        self.model, self.why_not_loaded = model, None
        self.loads += 1
        version = "" if model.version is None else f", version {model.version}"
        _LOG.info("loaded model %s (%s)%s", model.bundle.digest[:12], model.bundle.profile, version)
        self._report(new.note)
        return True

    def _refuse(self, reason: str) -> None:
        self.refusals += 1
        if self.model is None:
            self.why_not_loaded = f"the model cannot be served: {reason}"
            self._report(self.why_not_loaded)
        else:
            digest = self.model.bundle.digest[:12]
            self._report(f"model {digest} stays in use: a newer one cannot be served: {reason}")

    def _report(self, problem: str | None) -> None:
        """Set ``refused``, and log a new problem."""
        if problem is not None and problem != self.refused:
            _LOG.error("%s", problem)
        self.refused = problem


def load_model(path: Path, *, version: int | None = None) -> LoadedModel:
    """Load and verify a bundle, and score an empty row to trigger lazy imports.

    ``version``: registry version; None for a bundle from a folder.
    Raises ``InputError`` if it is not a bundle, or incompatible with this version of predrain.
    """
    import numpy as np  # slow to import, so only in the loader's thread

    from foundation.durations import parse_duration
    from models.bundle.store import load_bundle

    bundle = load_bundle(path)
    try:
        horizon_s = parse_duration(bundle.manifest["params"]["labels"]["horizon"]).total_seconds()
    except (KeyError, TypeError, ValueError):
        horizon_s = None
    columns = tuple(column.name for column in bundle.columns)
    model = LoadedModel(bundle, columns, None if version is None else str(version), horizon_s)
    empty = np.full((1, len(columns)), np.nan, dtype=np.float32)
    model.score(FeatureRows(empty, ["0"], np.zeros(1, dtype=np.int64)))
    return model
