"""The bundle that scores feature rows: loaded in a thread after the start, so that nothing waits for it.

The light scorer reads it, which needs neither pandas nor a library that trains; a profile that only those score is read
as the full bundle, and the log says why.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from features.errors import InputError

if TYPE_CHECKING:
    from models.bundle import Bundle
    from models.light.bundle import LightBundle
    from serving.http.rows import FeatureRows

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A bundle that is ready.

    Attributes
    ----------
    score : callable
        From ``FeatureRows`` to a list of ``unit``, ``risk``, ``score``, ``rank``, ``alert``, in the order of the rows;
        ranks and alerts are taken among the rows of one decision time.
    columns : tuple of str
        Its features' names, in order.
    digest, profile, version : str
        What answers say of it.
    fitted_at : datetime
        End of what it knew (aware UTC).
    horizon_s : float or None
        Seconds that a risk is of, if the bundle tells.
    heavy : str or None
        Why the full bundle scores; None: the light scorer does.
    """

    score: Callable[[FeatureRows], list[dict[str, Any]]]
    columns: tuple[str, ...]
    digest: str
    profile: str
    version: str | None
    fitted_at: datetime
    horizon_s: float | None
    heavy: str | None = None

    def about(self) -> dict[str, Any]:
        """Return what answers say of the model."""
        return {"digest": self.digest, "profile": self.profile, "version": self.version}


class ModelHolder:
    """Loads a bundle once, in a thread.

    Parameters
    ----------
    path : pathlib.Path or None
        The bundle's folder; None: rows are not scored.

    Attributes
    ----------
    model : LoadedModel or None
        None: not there, not yet or not at all.
    trouble : str or None
        Why it is not there.
    """

    def __init__(self, path: Path | None) -> None:
        self.wanted = path is not None
        self.model: LoadedModel | None = None
        self.trouble: str | None = "the model is being loaded" if self.wanted else None
        self._path = path
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        if self.wanted:
            self._thread.start()

    def load(self) -> None:
        """Load now; what is wrong with the bundle stands in ``trouble``."""
        assert self._path is not None
        try:
            self.model = load_model(self._path)
        except InputError as error:
            self.trouble = f"the model cannot be served: {error}"
            _LOG.error("%s", self.trouble)
        else:
            self.trouble = None
            _LOG.info("model %s (%s) is loaded", self.model.digest[:12], self.model.profile)

    def _run(self) -> None:
        try:
            self.load()
        except Exception as error:  # told by /readyz; a thread's end would be silent
            self.trouble = f"the model cannot be loaded: {type(error).__name__}"
            _LOG.exception("the model cannot be loaded")


def load_model(path: Path) -> LoadedModel:
    """Load and verify a bundle, and score one empty row, so that what is compiled late is compiled now.

    Raises
    ------
    InputError
        If it is none, or does not fit this version.
    """
    import numpy as np  # noqa: PLC0415 - heavy: this runs in the loader's thread

    from models.light.bundle import load_light  # noqa: PLC0415
    from models.light.errors import HeavyModelError  # noqa: PLC0415
    from serving.http.rows import FeatureRows  # noqa: PLC0415

    try:
        light = load_light(path)
    except HeavyModelError as heavy:
        _LOG.warning("the model is scored by the full bundle, which takes more time and memory: %s", heavy.why)
        model = _of_full(path, heavy.why)
    else:
        model = _of_light(light)
    empty = np.full((1, len(model.columns)), np.nan, dtype=np.float32)
    model.score(FeatureRows(empty, ["0"], np.zeros(1, dtype=np.int64), False))
    return model


def _of_light(bundle: LightBundle) -> LoadedModel:
    def score(rows: FeatureRows) -> list[dict[str, Any]]:
        found = bundle.score(rows.values, rows.times, rows.units)
        return _answers(rows.units, found.risk, found.score, found.rank, found.alert)

    return LoadedModel(
        score,
        tuple(column.name for column in bundle.columns),
        bundle.digest,
        bundle.profile,
        _version(bundle.manifest),
        bundle.facts.refit_at,
        _horizon_s(bundle.manifest),
    )


def _of_full(path: Path, why: str) -> LoadedModel:
    import numpy as np  # noqa: PLC0415 - only where the light scorer does not do
    import pandas as pd  # noqa: PLC0415

    from models.bundle import load_bundle  # noqa: PLC0415

    bundle: Bundle = load_bundle(path)

    def score(rows: FeatureRows) -> list[dict[str, Any]]:
        times = pd.Series(pd.DatetimeIndex(rows.times.astype("datetime64[ms]"), tz="UTC"))
        scored = bundle.fitted.score(rows.values, times, np.array(rows.units, dtype=object))
        mine = scored[scored["model"] == bundle.profile]
        return _answers(mine["unit"], mine["risk"], mine["score"], mine["rank"], mine["alert"])

    return LoadedModel(
        score,
        tuple(column.name for column in bundle.fitted.columns),
        bundle.digest,
        bundle.profile,
        _version(bundle.manifest),
        bundle.fitted.refit_at,
        _horizon_s(bundle.manifest),
        why,
    )


def _answers(*columns: Iterable[Any]) -> list[dict[str, Any]]:
    return [
        {"unit": unit, "risk": float(risk), "score": float(score), "rank": int(rank), "alert": bool(alert)}
        for unit, risk, score, rank, alert in zip(*columns, strict=True)
    ]


def _version(manifest: dict[str, Any]) -> str | None:
    version = manifest.get("version")
    return None if version is None else str(version)


def _horizon_s(manifest: dict[str, Any]) -> float | None:
    from telemetry.config import parse_duration  # noqa: PLC0415 - only with a model

    try:
        return float(parse_duration(str(manifest["params"]["labels"]["horizon"])).total_seconds())
    except (KeyError, TypeError, ValueError, InputError):
        return None
