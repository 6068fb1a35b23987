"""Loads the bundle to score with, from a folder or a local copy of the registry's champion.

:class:`ModelHolder` holds the service's model and swaps it atomically; :class:`ModelSource` loads the model of batch
scoring. The service polls the registry in a thread, batch scoring at each decision; only then is MLflow imported.
"""

import atexit
import hashlib
import logging
import os
import shutil
import tempfile
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


class BundlePendingError(InputError):
    """The source has started but not resolved its bundle yet; not a failure."""


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

    def start(self) -> None:
        """Start the source; a no-op for a folder."""

    def stop(self) -> None:
        """Stop what :meth:`start` started."""

    def stamp(self) -> object:
        """Return a value that changes with the bundle; cheap enough to poll every second."""
        return stamp_of(self.path / MANIFEST)

    def resolve(self) -> ResolvedBundle:
        """Return the current bundle.

        Raises ``BundlePendingError`` until the first bundle is resolved, ``InputError`` if there is none.
        """
        return ResolvedBundle(self.path)


def manifest_digest(bundle: Path) -> str:
    """Return the SHA-256 of a bundle's manifest; empty if it is unreadable, which loading then reports."""
    try:
        return hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return ""


class ChampionCopy(FolderBundle):
    """Local copy of the champion: ``bundle/``, with its registry version in the file ``version``.

    ``error``: why the last fetch from the registry failed; None: it succeeded, or has not run yet.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.error: str | None = None

    @property
    def bundle(self) -> Path:
        """Folder of the bundle; may not exist."""
        return self.path / "bundle"

    def stamp(self) -> object:
        """Return a value that changes with the champion's version and the state of the registry."""
        return stamp_of(self.bundle / MANIFEST), self.version(), self.error

    def resolve(self) -> ResolvedBundle:
        """Return the champion's bundle; see :meth:`FolderBundle.named`."""
        version, error = self.version(), self.error
        if version is None:
            raise (BundlePendingError if error is None else InputError)(
                error or "the champion has not been fetched yet",
                "the registry",
                "Check --registry and --name, and that there is a champion (`predrain promote`).",
            )
        note = None if error is None else f"the champion cannot be read from the registry: {error}"
        return ResolvedBundle(self.bundle, version, note)

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
    recover_folder(ChampionCopy(folder).bundle)  # a process may have been killed while replacing it
    return folder


CHAMPION: Final = "champion"
"""Model argument that selects the registry's champion instead of a folder."""


def copy_champion(copy: ChampionCopy, registry: str, name: str, *, force: bool = False) -> bool:
    """Update the copy if the champion has changed, and return whether it was updated.

    ``force``: fetch even if unchanged, so that a restart repairs a corrupted copy.
    Raises ``TooEarlyError`` if there is no champion yet, ``InputError`` if the registry is unreachable or its bundle is
    not the registered one.
    """
    # By default MLflow waits many minutes for an unresponsive registry.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    from models.registry.champion import champion_history, fetch_bundle, version_at  # MLflow takes seconds to import

    history = champion_history(registry, name)
    history.refuse_unseated(name)
    number = history.champion
    if number is None:
        raise TooEarlyError(
            "there is no champion yet",
            f"model {name}, {registry}",
            "`predrain retrain` makes the first one; or give the folder of a bundle.",
        )
    version = version_at(registry, name, number)
    if (copy.version(), manifest_digest(copy.bundle)) == (number, version.digest) and not force:
        return False
    with tempfile.TemporaryDirectory(prefix="predrain-champion-") as folder:
        copy.take(fetch_bundle(registry, name, version, Path(folder)), number)
    return True


class ModelSource:
    """Loads the bundle for batch scoring, and reloads it when it changes.

    ``model``: a bundle's folder, or :data:`CHAMPION` for the champion of the registered model ``name`` (write a folder
    of that name as ``./champion``).
    """

    def __init__(self, model: str, *, registry: str, name: str) -> None:
        self._source = ChampionCopy(temporary_folder()) if model == CHAMPION else FolderBundle(Path(model))
        self._registry, self._name = registry, name
        self._loaded: ServedModel | None = None

    def current(self) -> "ServedModel":
        """Return the current model, or the previous one if the current one cannot be loaded.

        Raises ``InputError`` if there is no previous one either.
        """
        from models.bundle.store import load_bundle  # takes seconds to import
        from serving.scores.batch import ServedModel

        loaded = self._loaded
        try:
            if isinstance(self._source, ChampionCopy):
                copy_champion(self._source, self._registry, self._name)
            new = self._source.resolve()
            if loaded is None or loaded.version != new.version or loaded.bundle.digest != manifest_digest(new.path):
                bundle = load_bundle(new.path)
                refuse_other_writers(bundle.path, [bundle.path / MANIFEST])  # it holds all other files' digests
                self._loaded = loaded = ServedModel(bundle, new.version)
        except InputError as error:
            if self._loaded is None:
                raise
            return replace(self._loaded, note=f"the current model stays in use: {error}")
        return loaded


class ChampionBundle(ChampionCopy):
    """The champion of a registered model, kept up to date by a thread.

    ``folder``: local copy; an existing one is served until the registry responds.
    """

    def __init__(self, folder: Path, registry: str, name: str, every_s: float = 30.0) -> None:
        super().__init__(folder)
        self._registry, self._name = registry, name
        self._is_fetched = False
        self._poller = Poller("champion", self._watch, every_s)

    def start(self) -> None:
        """Start the thread."""
        self._poller.start()

    def stop(self) -> None:
        """Stop the thread; wait at most 3 s for the registry."""
        self._poller.stop(3)

    def _watch(self) -> None:
        """Poll the registry once; a failure is stored in ``error``, and logged once."""
        error = None
        try:
            if copy_champion(self, self._registry, self._name, force=not self._is_fetched):
                _LOG.info("version %s is champion", self.version())
            self._is_fetched = True
        except Exception as fault:  # may be transient: a registry restart, a full disk
            error = str(fault).partition("\n")[0] or type(fault).__name__
            if error != self.error:
                _LOG.warning("cannot load the champion: %s", error)
        self.error = error


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
        self.wanted = source is not None
        self.model: LoadedModel | None = None
        self.why_not_loaded: str | None = "the model is being loaded" if self.wanted else None
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
            self._source.start()
            self._poller.start()

    def stop(self) -> None:
        """Stop the thread and the source."""
        if self._source is not None:
            self._source.stop()
        self._poller.stop()

    def refresh(self) -> bool:
        """Load the bundle if it has changed since the last poll.

        Returns: whether another model is served now. A bundle that cannot be loaded is only reported, and retried
        when it changes or after ten polls, because the folder may be half-written.
        """
        assert self._source is not None
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
                self.refused = new.note
                return False
            model = load_model(new.path, version=new.version)
        except BundlePendingError as waiting:
            if self.model is None:
                self.why_not_loaded, self.refused = f"the model is being fetched: {waiting.problem}", None
            else:
                self._refuse(str(waiting))
            return False
        except InputError as error:
            self._refuse(str(error))
            return False
        except Exception as error:  # reported by /readyz; the thread must survive to load the next one
            _LOG.exception("the model cannot be loaded")
            self._refuse(type(error).__name__)
            return False
        self.model, self.why_not_loaded, self.refused = model, None, new.note
        self.loads += 1
        _LOG.info("loaded model %s (%s)", model.bundle.digest[:12], model.bundle.profile)
        return True

    def _refuse(self, reason: str) -> None:
        self.refusals += 1
        reported = self.refused
        if self.model is None:
            self.why_not_loaded = self.refused = f"the model cannot be served: {reason}"
        else:
            self.refused = f"model {self.model.bundle.digest[:12]} stays in use: a newer one cannot be served: {reason}"
        if self.refused != reported:
            _LOG.error("%s", self.refused)


def load_model(path: Path, *, version: int | None = None) -> LoadedModel:
    """Load and verify a bundle, and score an empty row to trigger lazy imports.

    ``version``: registry version; default: the manifest's.
    Raises ``InputError`` if it is not a bundle, or incompatible with this version of predrain.
    """
    import numpy as np  # slow to import, so only in the loader's thread

    from foundation.durations import parse_duration
    from models.bundle.store import load_bundle

    bundle = load_bundle(path)
    number = bundle.manifest.get("version") if version is None else version
    try:
        horizon_s = parse_duration(bundle.manifest["params"]["labels"]["horizon"]).total_seconds()
    except (KeyError, TypeError, ValueError):
        horizon_s = None
    columns = tuple(column.name for column in bundle.columns)
    model = LoadedModel(bundle, columns, None if number is None else str(number), horizon_s)
    empty = np.full((1, len(columns)), np.nan, dtype=np.float32)
    model.score(FeatureRows(empty, ["0"], np.zeros(1, dtype=np.int64)))
    return model
