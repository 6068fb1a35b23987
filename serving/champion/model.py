"""The bundle that scores rows: loaded in a thread, so that nothing waits, and swapped for a newer one in one step."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundation.errors import InputError
from serving.champion.sources import FolderBundle, NotNamedYet, manifest_digest
from serving.polling import Poller

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from models.bundle.store import Bundle

_LOG = logging.getLogger(__name__)
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
