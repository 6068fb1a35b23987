"""The bundle that scores: of a folder, or the registry's champion copied into one; and loaded in a thread.

:class:`ModelHolder` scores rows in the service and swaps bundles in one step, :class:`ModelSource` gives batch scoring
its model. The service follows the champion in a thread, batch scoring asks at each decision; MLflow is imported then.
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


class NotNamedYet(InputError):
    """The source has started and does not know its bundle yet; this is not an error."""


@dataclass(frozen=True, slots=True)
class NamedBundle:
    """The bundle that a source names.

    ``version``: its version in the registry; None for one that comes from a folder.
    ``note``: why it may not be the newest; None: as far as is known it is.
    """

    path: Path
    version: int | None = None
    note: str | None = None


class FolderBundle:
    """Names the bundle to serve: the one in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self) -> None:
        """Start: nothing to do for a folder."""

    def stop(self) -> None:
        """Stop what :meth:`start` started."""

    def stamp(self) -> object:
        """Give what changes when another bundle is named; cheap, for it is asked each second."""
        return stamp_of(self.path / MANIFEST)

    def named(self) -> NamedBundle:
        """Name the bundle.

        Raises ``NotNamedYet`` if that is still being found out for the first time.
        Raises ``InputError`` if there is none.
        """
        return NamedBundle(self.path)


def manifest_digest(bundle: Path) -> str:
    """Give the digest of a bundle in a folder; empty where it cannot be read: loading it says why."""
    try:
        return hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return ""


class ChampionCopy(FolderBundle):
    """Names the champion's bundle in a folder: ``bundle/`` with ``version``, its number in the registry.

    ``error``: why the registry could not be asked, or its champion not be taken; None: it was, or is not asked yet.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.error: str | None = None

    @property
    def bundle(self) -> Path:
        """The folder of the bundle; it may not exist."""
        return self.path / "bundle"

    def stamp(self) -> object:
        """Give what changes when another version is champion, or the registry can no longer be asked."""
        return stamp_of(self.bundle / MANIFEST), self.version(), self.error

    def named(self) -> NamedBundle:
        """Name the champion's bundle; see :meth:`FolderBundle.named`."""
        version, error = self.version(), self.error
        if version is None:
            raise (NotNamedYet if error is None else InputError)(
                error or "the champion has not been fetched yet",
                "the registry",
                "Check --registry and --name, and that there is a champion (`predrain promote`).",
            )
        note = None if error is None else f"the champion cannot be read from the registry: {error}"
        return NamedBundle(self.bundle, version, note)

    def version(self) -> int | None:
        """Read the current version; None if there is none."""
        try:
            return int((self.bundle / "version").read_text())
        except (OSError, ValueError):
            return None

    def take(self, bundle: Path, version: int) -> None:
        """Replace the current bundle by a copy of another; raises ``InputError`` if the disk is full."""
        with FolderSwap(self.bundle) as swap, disk_errors(self.path):
            shutil.copytree(bundle, swap.path, dirs_exist_ok=True)
            (swap.path / "version").write_text(str(version))
            for path in swap.path.rglob("*"):
                fsync_path(path)
            swap.commit()


def temporary_folder() -> Path:
    """Make a folder for a copy that goes with this process."""
    folder = Path(tempfile.mkdtemp(prefix="predrain-champion-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def held_folder(state: Path) -> Path:
    """Give the folder of the champion that stays over restarts, and hold the right to it as long as the process lives.

    Raises ``InputError`` if another process has it, or it may not be written to.
    """
    with disk_errors(state):
        if state.exists() and not state.is_dir():
            raise InputError("the path is a file", str(state), "Choose another folder.")
        state.mkdir(parents=True, exist_ok=True)
    do = "End it, or give each its own --state."
    lock = take_lock(state / "lock", "another predrain serve keeps its state here", str(state), do).lock
    atexit.register(lock.release)  # which also keeps the lock from being collected
    folder = state / "champion"
    recover_folder(ChampionCopy(folder).bundle)  # of a process that was killed while it replaced the bundle
    return folder


CHAMPION: Final = "champion"
"""Names the champion of the registry instead of a folder."""


def copy_champion(copy: ChampionCopy, registry: str, name: str, *, again: bool = False) -> bool:
    """Copy the champion's bundle where it is another one than the copy's.

    ``again``: fetch it in any case: a restart makes good what a disk has done.
    Raises ``TooEarlyError`` if there is no champion yet, ``InputError`` if the registry cannot be asked, or its bundle
    is not the one that was registered.
    """
    # By default MLflow waits many minutes for a registry that does not answer.
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
    if (copy.version(), manifest_digest(copy.bundle)) == (number, version.digest) and not again:
        return False
    with tempfile.TemporaryDirectory(prefix="predrain-champion-") as folder:
        copy.take(fetch_bundle(registry, name, version, Path(folder)), number)
    return True


class ModelSource:
    """Loads the bundle for batch scoring; again when another one is named.

    ``model``: a bundle's folder, or :data:`CHAMPION` of the registered model ``name`` (a folder of that name:
    ``./champion``).
    """

    def __init__(self, model: str, *, registry: str, name: str) -> None:
        self._source = ChampionCopy(temporary_folder()) if model == CHAMPION else FolderBundle(Path(model))
        self._registry, self._name = registry, name
        self._loaded: ServedModel | None = None

    def current(self) -> "ServedModel":
        """Give the present model; the one that was given before where the present one cannot be had.

        Raises ``InputError`` if there is none, and none was given before.
        """
        from models.bundle.store import load_bundle  # takes seconds to import; the service does not need it
        from serving.scores.batch import ServedModel

        loaded = self._loaded
        try:
            if isinstance(self._source, ChampionCopy):
                copy_champion(self._source, self._registry, self._name)
            named = self._source.named()
            if loaded is None or loaded.version != named.version or loaded.bundle.digest != manifest_digest(named.path):
                bundle = load_bundle(named.path)
                refuse_other_writers(bundle.path, [bundle.path / "manifest.json"])  # which seals all other files
                self._loaded = loaded = ServedModel(bundle, named.version)
        except InputError as error:
            if self._loaded is None:
                raise
            return replace(self._loaded, note=f"the current model stays in use: {error}")
        return loaded


class ChampionBundle(ChampionCopy):
    """The champion of a registered model, kept up to date by a thread.

    ``folder``: where its bundle is kept; an existing one is served until the registry has answered.
    """

    def __init__(self, folder: Path, registry: str, name: str, every_s: float = 30.0) -> None:
        super().__init__(folder)
        self._registry, self._name = registry, name
        self._is_taken = False
        self._poller = Poller("champion", self._watch, every_s)

    def start(self) -> None:
        """Start the thread."""
        self._poller.start()

    def stop(self) -> None:
        """End it; a registry that does not answer is not waited for."""
        self._poller.stop(3)

    def _watch(self) -> None:
        """Ask once; what goes wrong is kept as ``error``, and logged once."""
        error = None
        try:
            if copy_champion(self, self._registry, self._name, again=not self._is_taken):
                _LOG.info("version %s is champion", self.version())
            self._is_taken = True
        except Exception as fault:  # the next look may go well: a registry is restarted, a disk freed
            error = str(fault).partition("\n")[0] or type(fault).__name__
            if error != self.error:
                _LOG.warning("cannot load the champion: %s", error)
        self.error = error


_RETRY_ROUNDS = 10
_NEVER = object()


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Rows ready to score.

    ``values``: in the model's order; NaN: missing; shape (n_rows, n_features).
    ``units``: as given; else the rows' numbers from 0.
    ``times``: decision times, milliseconds since 1970 (UTC); 0 where none were given; shape (n_rows,).
    """

    values: "npt.NDArray[np.float32]"
    units: list[str]
    times: "npt.NDArray[np.int64]"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A bundle that is ready; ``columns``: names of its features, in its order."""

    bundle: "Bundle"
    columns: tuple[str, ...]
    version: str | None
    horizon_seconds: float | None

    @property
    def digest(self) -> str:
        """The bundle's digest."""
        return self.bundle.digest

    def about(self) -> dict[str, Any]:
        """Return what answers say of the model."""
        return {"digest": self.digest, "profile": self.bundle.profile, "version": self.version}

    def score(self, rows: FeatureRows) -> list[dict[str, Any]]:
        """Give ``unit``, ``risk``, ``score``, ``rank``, ``alert`` of rows, in their order.

        Ranks and alerts are taken among the rows of one decision time.
        """
        from models.rows.ranking import text_hashes

        fitted, profile = self.bundle.fitted, self.bundle.profile
        unit = text_hashes(rows.units)  # the node is unknown, so each unit counts by itself
        scored = fitted.score_arrays(rows.values, rows.times, unit, unit)[profile]
        columns = (rows.units, fitted.risk(profile, scored.score), scored.score, scored.rank, scored.alert)
        return [
            {"unit": unit, "risk": float(risk), "score": float(score), "rank": int(rank), "alert": bool(alert)}
            for unit, risk, score, rank, alert in zip(*columns, strict=True)
        ]


class ModelHolder:
    """Loads the bundle of a source in a thread, and again whenever the source names another one.

    ``source``: a bundle's folder, or what names one; None: rows are not scored.
    ``model``: None: not there, not yet or not at all. Take it once a request: what was taken never changes, so a
    request that began with one model ends with it.
    ``refused``: why the one that the source names now is not taken, or cannot be known; the one of before continues.
    """

    def __init__(self, source: Path | FolderBundle | None, poll_s: float = 1.0) -> None:
        self.wanted = source is not None
        self.model: LoadedModel | None = None
        self.trouble: str | None = "the model is being loaded" if self.wanted else None
        self.refused: str | None = None
        self.loads = 0
        self.refusals = 0
        self._source = FolderBundle(source) if isinstance(source, Path) else source
        self._poller = Poller("model", self.look, poll_s)
        self._seen: object = _NEVER
        self._wait = 0

    def start(self) -> None:
        """Start; the first model is loaded immediately, in the thread."""
        if self._source is not None:
            self._source.start()
            self._poller.start()

    def stop(self) -> None:
        """End the thread, and what the source has started."""
        if self._source is not None:
            self._source.stop()
        self._poller.stop()

    def look(self) -> bool:
        """Load the model if the source names another one than at the last look.

        Returns: whether another model is served now. One that cannot be loaded changes nothing but the report
        of it, and is tried again when it changes or after some looks: a folder may be half written.
        """
        assert self._source is not None
        stamp = self._source.stamp()
        self._wait -= 1
        if stamp == self._seen and (self.refused is None or self._wait > 0):
            return False
        self._seen, self._wait = stamp, _RETRY_ROUNDS
        try:
            named = self._source.named()
            current = self.model
            version = current is not None and (named.version is None or current.version == str(named.version))
            if current is not None and version and current.digest == manifest_digest(named.path):
                self.refused = named.note
                return False
            model = load_model(named.path, version=named.version)
        except NotNamedYet as waiting:
            if self.model is None:
                self.trouble, self.refused = f"the model is being fetched: {waiting.what}", None
            else:
                self._refuse(str(waiting))
            return False
        except InputError as error:
            self._refuse(str(error))
            return False
        except Exception as error:  # reported by /readyz; the thread must live to take the next one
            _LOG.exception("the model cannot be loaded")
            self._refuse(type(error).__name__)
            return False
        self.model, self.trouble, self.refused = model, None, named.note
        self.loads += 1
        _LOG.info("loaded model %s (%s)", model.digest[:12], model.bundle.profile)
        return True

    def _refuse(self, why: str) -> None:
        self.refusals += 1
        reported = self.refused
        if self.model is None:
            self.trouble = self.refused = f"the model cannot be served: {why}"
        else:
            self.refused = f"the model {self.model.digest[:12]} is kept, a newer one cannot be served: {why}"
        if self.refused != reported:
            _LOG.error("%s", self.refused)


def load_model(path: Path, *, version: int | None = None) -> LoadedModel:
    """Load and verify a bundle, and score one empty row, so that what is imported late is imported now.

    ``version``: its version in a registry; default: what its manifest says.
    Raises ``InputError`` if it is none, or does not fit this version.
    """
    import numpy as np  # imported in the loader's thread, because it is slow

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
