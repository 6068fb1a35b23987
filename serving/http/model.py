"""The bundle that scores feature rows: loaded in a thread after the start, so that nothing waits for it."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from features.errors import InputError

if TYPE_CHECKING:
    from models.bundle import Bundle
    from serving.http.rows import FeatureRows

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A bundle that is ready.

    Attributes
    ----------
    bundle : Bundle
    columns : tuple of str
        Its features' names, in order.
    digest, profile, version : str
        What answers say of it.
    fitted_at : datetime
        End of what it knew (aware UTC).
    horizon_s : float or None
        Seconds that a risk is of, if the bundle tells.
    """

    bundle: Bundle
    columns: tuple[str, ...]
    digest: str
    profile: str
    version: str | None
    fitted_at: datetime
    horizon_s: float | None

    def about(self) -> dict[str, Any]:
        """Return what answers say of the model."""
        return {"digest": self.digest, "profile": self.profile, "version": self.version}

    def score(self, rows: FeatureRows) -> list[dict[str, Any]]:
        """Score rows with the bundle's profile; ranks and alerts are taken among the rows of one decision time.

        Returns
        -------
        list of dict
            ``unit``, ``risk``, ``score``, ``rank``, ``alert``, in the order of the rows.
        """
        import numpy as np  # noqa: PLC0415 - the module is imported where no model is served
        import pandas as pd  # noqa: PLC0415

        times = pd.Series(pd.DatetimeIndex(rows.times.astype("datetime64[ms]"), tz="UTC"))
        scored = self.bundle.fitted.score(rows.values, times, np.array(rows.units, dtype=object))
        mine = scored[scored["model"] == self.profile]
        table = zip(mine["unit"], mine["risk"], mine["score"], mine["rank"], mine["alert"], strict=True)
        return [
            {"unit": unit, "risk": float(risk), "score": float(score), "rank": int(rank), "alert": bool(alert)}
            for unit, risk, score, rank, alert in table
        ]


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

    from models.bundle import load_bundle  # noqa: PLC0415
    from serving.http.rows import FeatureRows  # noqa: PLC0415

    bundle = load_bundle(path)
    manifest = bundle.manifest
    version = manifest.get("version")
    model = LoadedModel(
        bundle,
        tuple(column.name for column in bundle.fitted.columns),
        bundle.digest,
        bundle.profile,
        None if version is None else str(version),
        bundle.fitted.refit_at,
        _horizon_s(manifest),
    )
    empty = np.full((1, len(model.columns)), np.nan, dtype=np.float32)
    model.score(FeatureRows(empty, ["0"], np.zeros(1, dtype=np.int64), False))
    return model


def _horizon_s(manifest: dict[str, Any]) -> float | None:
    from telemetry.config import parse_duration  # noqa: PLC0415 - only with a model

    try:
        return float(parse_duration(str(manifest["params"]["labels"]["horizon"])).total_seconds())
    except (KeyError, TypeError, ValueError, InputError):
        return None
