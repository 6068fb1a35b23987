"""The past incidents that looked most like an alert: a library of them, a distance, and what closeness is worth.

A distance is taken over the features that the alert's own score is made of, each weighing what it contributed, after
the scaling of :class:`models.prepared.SignedLogScaler`; no group of features may weigh more than :data:`GROUP_CAP`. It
is relative: 0 means the same in every feature that counts, 1 as far away as a unit with the usual value of each. What
a distance is worth is told by healthy units: where they come as close as the nearest incident does, the likeness says
nothing.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from features.times import instant_ms, milliseconds
from features.vocabulary import FeatureColumn
from models.prepared import SignedLogScaler
from models.ranking import Floats, Ints, mix, name_hashes, seed_of
from models.row_reader import RowReader
from models.training_set import Matrix

MAX_INCIDENTS: Final = 2000
"""Incidents in a library at most: the latest ones."""

HEALTHY_ROWS: Final = 2000
"""Rows without an incident in a library at most, spread by chance over the same time."""

GROUP_CAP: Final = 0.5
"""Share of all weight that one group of features may have: telemetry has hundreds of columns, history a hundred."""

WEIGHTED_COLUMNS: Final = 40
"""Columns of an alert that a distance is taken over: those that contributed most."""

NEAREST: Final = 3
"""Precedents given of an alert at most."""

ALIKE: Final = 0.5
"""Relative distance up to which an incident counts as alike: no more than half as far as an unremarkable unit."""

CLOSER: Final = 2.0
"""Incidents must come as close at least this many times as often as healthy rows do for a likeness to be told."""


@dataclass(frozen=True, slots=True)
class PrecedentLibrary:
    """Past incidents as they looked at the last decision before, and healthy rows beside them.

    ``columns``: the features, in order.
    ``incidents``: rows at the last decision before each onset; NaN: unknown; shape (n_incidents, n_features).
    ``healthy``: rows after which nothing failed; shape (n_healthy, n_features).
    ``decision_ms``, ``start_ms``: when the row was decided, and when the incident started, in milliseconds since the
    epoch; shape (n_incidents,).
    ``failure_class``: class of each incident.
    """

    columns: tuple[FeatureColumn, ...]
    incidents: np.ndarray
    healthy: np.ndarray
    unit: tuple[str, ...]
    decision_ms: Ints
    start_ms: Ints
    failure_class: tuple[str, ...]
    _near: np.ndarray = field(init=False, repr=False, compare=False)
    _usual: np.ndarray = field(init=False, repr=False, compare=False)
    _scaler: SignedLogScaler | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Healthy rows say what is usual. A library without them has no scale, so it finds nothing.
        scaler = SignedLogScaler().fit(self.healthy) if len(self.healthy) > 1 and len(self.columns) else None
        object.__setattr__(self, "_scaler", scaler)
        object.__setattr__(self, "_near", self._scaled(self.incidents))
        object.__setattr__(self, "_usual", self._scaled(self.healthy))

    def __len__(self) -> int:
        return len(self.unit)

    def class_counts(self) -> dict[str, int]:
        """Count the incidents of each class, by name."""
        return {name: self.failure_class.count(name) for name in sorted(set(self.failure_class))}

    def find(self, row: np.ndarray, contributions: Floats) -> Precedents:
        """Find the incidents that an alert looks most like.

        ``row``: the alert's features; shape (n_features,).
        ``contributions``: what each added to its score, see :func:`models.explanation.members.explained_by`; shape
        (n_features,).
        Returns: the nearest first; none where the library is empty or the alert differs from the usual in nothing that
        counts.
        """
        weight = weights_of(contributions, self.columns)
        chosen = np.argsort(-weight, kind="stable")[:WEIGHTED_COLUMNS]
        chosen = chosen[weight[chosen] > 0]
        none = Precedents((), 0, len(self), 0, len(self.healthy))
        if self._scaler is None or not len(self) or not chosen.size:
            return none
        own = self._scaled(row[None])[0, chosen].astype(np.float64)
        weight = weight[chosen]
        size = float(weight @ np.abs(own))
        if size <= 0:
            return none
        near = np.abs(self._near[:, chosen] - own) @ weight / size
        usual = np.abs(self._usual[:, chosen] - own) @ weight / size
        # equal distances: the later incident, so that the result does not depend on the order of rows
        order = np.lexsort((-self.decision_ms, near))[:NEAREST]
        found = tuple(
            Precedent(
                at=int(at),
                unit=self.unit[at],
                decision_ms=int(self.decision_ms[at]),
                start_ms=int(self.start_ms[at]),
                failure_class=self.failure_class[at],
                distance=float(near[at]),
            )
            for at in order
        )
        reach = found[-1].distance
        return Precedents(found, int((near <= reach).sum()), len(near), int((usual <= reach).sum()), len(usual))

    def agrees(self, row: np.ndarray, at: int, column: int) -> bool:
        """Whether an incident had an alert's value of a feature, to half of its distance from the usual one."""
        if self._scaler is None or math.isnan(float(row[column])):
            return False
        own = float(self._scaled(row[None])[0, column])
        return own != 0 and abs(float(self._near[at, column]) - own) <= abs(own) / 2

    def to_bytes(self) -> bytes:
        """Write the library as a Parquet file; the same library gives the same bytes."""
        count = (len(self), len(self.healthy))
        facts: dict[str, Any] = {
            "kind": np.repeat(["incident", "healthy"], count),
            "unit": [*self.unit, *[""] * count[1]],
            "decision_ms": np.append(self.decision_ms, np.zeros(count[1], np.int64)),
            "start_ms": np.append(self.start_ms, np.zeros(count[1], np.int64)),
            "failure_class": [*self.failure_class, *[""] * count[1]],
        }
        rows = np.concatenate([self.incidents, self.healthy]).astype(np.float32)
        facts |= {f"feature {column.name}": rows[:, at] for at, column in enumerate(self.columns)}
        out = io.BytesIO()
        pq.write_table(pa.table(facts), out, compression="zstd")
        return out.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes, columns: Sequence[FeatureColumn]) -> PrecedentLibrary:
        """Read what :meth:`to_bytes` wrote.

        Raises ``ValueError`` if the file is no such library, or of other features than ``columns``.
        """
        try:
            table = pq.read_table(io.BytesIO(content))
            kind = table["kind"].to_numpy(zero_copy_only=False)
            first = int((kind == "incident").sum())
            expected = [f"feature {column.name}" for column in columns]
            if table.column_names[5:] != expected:
                raise ValueError(f"its features are not the {len(expected)} of the bundle")
            rows = np.empty((table.num_rows, len(expected)), np.float32)
            for at, name in enumerate(expected):
                rows[:, at] = table[name].to_numpy()
            return cls(
                columns=tuple(columns),
                incidents=rows[:first],
                healthy=rows[first:],
                unit=tuple(table["unit"].to_pylist()[:first]),
                decision_ms=table["decision_ms"].to_numpy()[:first].astype(np.int64),
                start_ms=table["start_ms"].to_numpy()[:first].astype(np.int64),
                failure_class=tuple(table["failure_class"].to_pylist()[:first]),
            )
        except (pa.ArrowInvalid, KeyError) as error:
            raise ValueError(f"not a library of precedents: {error}") from None

    def _scaled(self, rows: np.ndarray) -> np.ndarray:
        empty = np.zeros((len(rows), len(self.columns)), np.float32)
        if self._scaler is None or not len(rows):
            return empty
        scaled = self._scaler.transform(np.asarray(rows, np.float32))
        # codes of categories have no distance; what they are is said in words
        scaled[:, [bool(column.categories) for column in self.columns]] = 0
        return scaled


@dataclass(frozen=True, slots=True)
class Precedent:
    """One past incident that an alert looks like.

    ``at``: its position in the library.
    ``decision_ms``, ``start_ms``: when it looked like that, and when it started, in milliseconds since the epoch.
    ``distance``: 0: the same in all that counts; 1: as far as a unit with the usual values.
    """

    at: int
    unit: str
    decision_ms: int
    start_ms: int
    failure_class: str
    distance: float


@dataclass(frozen=True, slots=True)
class Precedents:
    """What was found for one alert.

    ``found``: the nearest first, at most :data:`NEAREST`.
    ``incidents_as_close``, ``incidents``: incidents of the library at most as far away as the last of ``found``, and
    all.
    ``healthy_as_close``, ``healthy``: healthy rows at most as far away, and all.
    """

    found: tuple[Precedent, ...]
    incidents_as_close: int
    incidents: int
    healthy_as_close: int
    healthy: int

    @property
    def alike(self) -> bool:
        """Whether the nearest is near, and incidents come that close :data:`CLOSER` times as often as healthy rows."""
        if not self.found or self.found[0].distance > ALIKE:
            return False
        return self.incidents_as_close / self.incidents >= CLOSER * self.healthy_as_close / self.healthy


def weights_of(contributions: Floats, columns: Sequence[FeatureColumn]) -> Floats:
    """Give the weight of each feature in a distance: its share of the contributions, groups held to their cap.

    ``contributions``: additions to a score; shape (n_features,).
    Returns: adding up to 1 before the caps; a group above :data:`GROUP_CAP` is scaled down to it. All 0 where nothing
    contributed. Categories get 0; shape (n_features,).
    """
    size = np.abs(np.asarray(contributions, np.float64))
    size = np.where([bool(column.categories) for column in columns], 0.0, size)
    total = float(size.sum())
    if total <= 0:
        return np.zeros(len(columns))
    weight = size / total
    groups = np.array([column.group for column in columns])
    for group in sorted(set(groups)):
        own = groups == group
        share = float(weight[own].sum())
        if share > GROUP_CAP:
            weight[own] *= GROUP_CAP / share
    return weight


def library_at(matrix: Matrix, as_of: datetime, *, seed: int, values: RowReader | None = None) -> PrecedentLibrary:
    """Gather the incidents whose labels were complete and known at a time, and healthy rows of the same time.

    ``seed``: of the draw of healthy rows, which depends on their unit and time and on nothing else.
    ``values``: reads rows of the matrix; by default the matrix itself does.
    Returns: possibly empty.
    """
    rows = matrix.rows
    labels = matrix.labels(as_of)
    as_of_ms = instant_ms(as_of)
    known = ~rows["augmented"].to_numpy(dtype=bool) & (milliseconds(labels["complete_at"]) <= as_of_ms)
    label = labels["label"].fillna(-1).to_numpy(dtype=np.int8)
    time = milliseconds(rows["decision_time"])
    positive = np.flatnonzero(known & (label == 1))
    incident = labels["incident"].iloc[positive].to_numpy(dtype=np.int64)
    order = np.lexsort((time[positive], incident))
    last = order[np.append(incident[order][1:] != incident[order][:-1], True)] if order.size else order
    chosen = positive[last]
    start = milliseconds(labels["incident_start"].iloc[chosen])
    unit = rows["unit"].to_numpy(dtype=object)
    by_start = np.lexsort((unit[chosen].astype(str), start))[-MAX_INCIDENTS:]
    chosen, start = chosen[by_start], start[by_start]
    healthy = np.flatnonzero(known & (label == 0))
    if healthy.size > HEALTHY_ROWS:
        priority = mix(name_hashes(unit[healthy]), time[healthy])
        priority = mix(priority, seed_of(seed, "precedents") % 2**62)
        healthy = np.sort(healthy[np.argsort(priority, kind="stable")[:HEALTHY_ROWS]])
    read = (values or matrix.values)(np.concatenate([chosen, healthy]))
    return PrecedentLibrary(
        columns=tuple(matrix.columns),
        incidents=read[: len(chosen)],
        healthy=read[len(chosen) :],
        unit=tuple(map(str, unit[chosen])),
        decision_ms=time[chosen],
        start_ms=start,
        failure_class=tuple(labels["failure_class"].iloc[chosen].fillna("other").astype("str")),
    )
