"""What a build is a function of: its order, and digests of all of it and of parts of it."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from features.config import DecisionSection, FeatureSection, Group, LabelSection
from features.times import NEVER, duration_ms, instant_ms
from telemetry.dataset.dataset import SampleFile
from telemetry.dataset.runs import DAY_MS
from telemetry.dataset.store import Dataset, Place

BUILT_FROM_NAME = "built-from.json"
"""Name of the file in a matrix's folder."""

_ROOM = Path(__file__).parents[1]
_NEWEST_RUNS = 2  # of each bucket: their days are known one by one, for these are the ones that grow


@dataclass(frozen=True, slots=True)
class BuiltFrom:
    """Everything but events and inventory, which a matrix holds as they are.

    ``settings``: digest of parameters and code.
    ``rows``: digest of what decides the rows: the dataset, some of the parameters, code.
    ``groups``: digest of what each group's values depend on beside the rows.
    ``slab``: length of the stretches of time that parts cover, milliseconds.
    ``layout``: how the dataset's samples are divided among files.
    ``span``: first and last instant of the dataset.
    ``files``: SHA-256 of each file of samples, by its path in the dataset.
    ``days``: for the newest runs' files the digest of each day, see :func:`telemetry.dataset.layout.day_digests`.
    """

    settings: str
    rows: str
    groups: dict[str, str]
    slab: int
    layout: dict[str, Any]
    span: tuple[datetime, datetime]
    files: dict[str, str]
    days: dict[str, dict[int, str]]

    @classmethod
    def of(cls, dataset: Dataset, *, settings: str, rows: str, groups: Mapping[Group, str], slab: int) -> BuiltFrom:
        """Note what a dataset is made of."""
        files = dataset.sample_files()
        newest: dict[int, set[int]] = {}
        for each in files:
            newest.setdefault(each.bucket, set()).add(each.run)
        recent = {(bucket, run) for bucket, runs in newest.items() for run in sorted(runs)[-_NEWEST_RUNS:]}
        found = {each.path: dataset.day_digests(each) for each in files if (each.bucket, each.run) in recent}
        return cls(
            settings=settings,
            rows=rows,
            groups={str(name): digest for name, digest in groups.items()},
            slab=slab,
            layout=_layout(dataset),
            span=dataset.meta.span,
            files={each.path: each.sha256 for each in files},
            days={path: days for path, days in found.items() if days is not None},
        )

    @classmethod
    def read(cls, folder: Path) -> BuiltFrom | None:
        """Read what stands beside a matrix; None where nothing does that can be used."""
        try:
            content = json.loads((folder / BUILT_FROM_NAME).read_text(encoding="utf-8"))
            first, last = (datetime.fromisoformat(each) for each in content["span"])
            days = {path: {int(day): digest for day, digest in of.items()} for path, of in content["days"].items()}
            return cls(
                settings=content["settings"],
                rows=content["rows"],
                groups=content["groups"],
                slab=content["slab"],
                layout=content["layout"],
                span=(first, last),
                files=content["files"],
                days=days,
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        content = {
            "settings": self.settings,
            "rows": self.rows,
            "groups": self.groups,
            "slab": self.slab,
            "layout": self.layout,
            "span": [instant.isoformat() for instant in self.span],
            "files": dict(sorted(self.files.items())),
            "days": {path: {str(day): digest for day, digest in of.items()} for path, of in sorted(self.days.items())},
        }
        return (json.dumps(content, indent=1) + "\n").encode()

    def first_other_sample(self, dataset: Dataset) -> int:
        """Return an instant (ms) before which the samples of a dataset are the same.

        :data:`~features.times.NEVER` where all are, ``-NEVER`` where nothing can be said.
        """
        if self.layout != _layout(dataset):
            return -NEVER
        files = {each.path: each for each in dataset.sample_files()}
        first = NEVER
        for path in {*self.files, *files}:
            here = files.get(path)
            if here is None or self.files.get(path) != here.sha256:
                first = min(first, self._first_other_day(path, here, dataset))
        return first

    def _first_other_day(self, path: str, here: SampleFile | None, dataset: Dataset) -> int:
        """Return when the first day begins on which a file is not what it was; where no days are known, its run."""
        before: Mapping[int, str] | None = self.days.get(path) if path in self.files else {}
        after = {} if here is None else dataset.day_digests(here)
        if before is None or after is None:
            runs = dataset.meta.runs
            return -NEVER if runs.days is None else runs.begin_ms(runs.of_file(path.rpartition("/")[2]))
        other = [day for day in {*before, *after} if before.get(day) != after.get(day)]
        return min(other) * DAY_MS if other else NEVER


def first_other_row(
    before: BuiltFrom,
    dataset: Dataset,
    *,
    delay: timedelta,
    events: tuple[pa.Table, pa.Table],
    inventory: tuple[pa.Table, pa.Table],
) -> int:
    """Return an instant before which nothing was known that is different now: rows until then are the same.

    ``delay``: ``features.delay``.
    ``events``: the existing matrix's and the present ones, from :func:`features.installations.reported`.
    Returns: milliseconds since 1970: rows decided before, and augmented rows established before, stand as they are.
    ``-NEVER``: none; :data:`~features.times.NEVER`: all.
    """
    if before.span[0] != dataset.meta.span[0]:  # where the grid begins
        return -NEVER
    instants = [_first_other_event(*events), _first_other_stay(*inventory)]
    sample = before.first_other_sample(dataset)
    instants.append(sample + duration_ms(delay) if abs(sample) < NEVER else sample)
    if before.span[1] != dataset.meta.span[1]:
        instants.append(instant_ms(min(before.span[1], dataset.meta.span[1])) + 1)  # where the grid ends
    return min(instants)


def _layout(dataset: Dataset) -> dict[str, Any]:
    meta = dataset.meta
    return {"unit": meta.unit, "buckets": meta.buckets, "run_days": meta.run_days, "columns": dataset.schema.names}


def _first_other_event(before: pa.Table, after: pa.Table) -> int:
    """Return when the first event was known behind the rows in which two tables, ordered by that, begin alike."""
    before, after = _plain(before), _plain(after)
    if before.schema != after.schema:
        return -NEVER
    alike, least = min(before.num_rows, after.num_rows), 0
    if not before.slice(0, alike).equals(after.slice(0, alike)):
        while least + 1 < alike:  # the first `least` rows are alike, the first `alike` are not
            middle = (least + alike) // 2
            if before.slice(least, middle - least).equals(after.slice(least, middle - least)):
                least = middle
            else:
                alike = middle
        alike = least
    rest = [table.column("known_at").slice(alike).cast(pa.int64()).to_numpy() for table in (before, after)]
    return min((int(known.min()) for known in rest if known.size), default=NEVER)


def _plain(table: pa.Table) -> pa.Table:
    """Spell out dictionaries: two that say the same in another order are not equal to Arrow."""
    fields = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields)).replace_schema_metadata(None).combine_chunks()


def _first_other_stay(before: pa.Table, after: pa.Table) -> int:
    """Return when the first stay that is not the same began, or ended, where its end alone is different."""
    if before.column_names != after.column_names:
        return -NEVER
    before, after = _plain(before), _plain(after)
    if before.equals(after):
        return NEVER
    old, new = Counter(_stays(before)), Counter(_stays(after))
    changed = {stay for stay, end in {*old, *new} if old[stay, end] != new[stay, end]}
    gone, come = _ends(old, changed), _ends(new, changed)
    first, installed_at = NEVER, [name for name in before.column_names if name != "removed_at"].index("installed_at")
    for stay in changed:
        installed, ends = stay[installed_at], [*gone[stay], *come[stay]]
        single = len(gone[stay]) == 1 == len(come[stay])
        first = min(first, *ends) if single else min(first, -NEVER if installed is None else installed)
    return first


def _stays(inventory: pa.Table) -> list[tuple[tuple[Any, ...], int]]:
    """List stays: what each says but its end, and its end (ms)."""
    said = [_values(inventory.column(name)) for name in inventory.column_names if name != "removed_at"]
    ends = [NEVER if end is None else end for end in _values(inventory.column("removed_at"))]
    return list(zip(zip(*said, strict=True), ends, strict=True))


def _values(column: pa.ChunkedArray) -> list[Any]:
    """Give a column as Python objects; instants in milliseconds."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms", tz=column.type.tz), safe=False).cast(pa.int64())
    values: list[Any] = column.to_pylist()
    return values


def _ends(
    stays: Counter[tuple[tuple[Any, ...], int]], chosen: set[tuple[Any, ...]]
) -> dict[tuple[Any, ...], list[int]]:
    found: dict[tuple[Any, ...], list[int]] = {stay: [] for stay in chosen}
    for (stay, end), count in stays.items():
        if stay in chosen:
            found[stay] += [end] * count
    return found


@dataclass(frozen=True, slots=True)
class BuildOrder:
    """Everything that a build is a function of, small enough to be sent along with each task.

    ``dataset``: Absolute; on storage one version.
    ``target``: where the matrix will stand; absolute.
    ``folder``: where its parts are written until then.
    ``digest``: of the matrix: :func:`digest_of` where the build began.
    ``base``: digest of the matrix that stands at the target, where it is extended; else empty.
    ``since``: its rows that were decided and established before this instant (ms) are taken over.
    ``taken``: groups whose columns are taken over from it, whole, because nothing that they depend on has changed.
    ``token``: of the spill, by which a machine knows that it sees the same folder and not one of its own by that name.
    """

    dataset: Place
    dataset_digest: str
    target: Path
    folder: Path
    decision: DecisionSection
    labels: LabelSection
    features: FeatureSection
    augmentation: int
    negative_ratio: int
    seed: int
    digest: str = ""
    base: str = ""
    since: int | None = None
    taken: tuple[Group, ...] = ()
    token: str = ""

    @property
    def spill_key(self) -> str:
        """Digest that names the spill: what the buckets give depends on the rows that are computed."""
        return hashlib.sha256(f"{self.digest} {self.base} {self.since} {self.taken}".encode()).hexdigest()


@functools.cache
def code_digest() -> str:
    """Return the SHA-256 of this room's source files: a matrix made by other code is not the same matrix."""
    total = hashlib.sha256()
    for path in sorted(_ROOM.rglob("*.py")):
        total.update(path.relative_to(_ROOM).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def digest_of(order: BuildOrder) -> str:
    """Digest what a matrix is a function of: the dataset's content, the settings, and this room's code as it runs here.

    Returns: SHA-256, hexadecimal.
    """
    return hashlib.sha256(f"{order.dataset_digest} {settings_digest(order)}".encode()).hexdigest()


def rows_digest(order: BuildOrder) -> str:
    """Digest what decides which rows a matrix has, of the dataset and everything else."""
    content = {
        "dataset": order.dataset_digest,
        "delay": order.features.model_dump(mode="json", include={"delay"}),
        **_settings(order, of=()),
    }
    return _digest(content)


def group_digests(order: BuildOrder, reach: int) -> dict[Group, str]:
    """Digest, for each group that is on, what its values depend on beside the rows.

    ``reach``: how far back windows may look, in milliseconds: the level of a counter has no other limit.
    """
    found: dict[Group, str] = {}
    for group in order.features.groups:
        content = order.features.model_dump(mode="json", include={"delay", "channels", *_DEPENDS_ON[group]})
        if group not in ("history", "static"):
            content["reach"] = reach
        found[group] = _digest(content)
    return found


_DEPENDS_ON: Mapping[Group, tuple[str, ...]] = {
    "telemetry": ("windows",),
    "history": ("history_windows", "history_scopes"),
    "peers": ("peer_window",),
    "onset": ("onset",),
    "gaps": ("windows",),
    "workload": ("windows",),
    "static": ("static",),
}
"""The parameters under ``features`` that each group's values depend on, beside ``delay`` and ``channels``. Labels, by
which ``history`` knows classes of failures, decide the rows as well."""


def settings_digest(order: BuildOrder) -> str:
    """Digest what a matrix is a function of beside the dataset, as :func:`digest_of` does."""
    return _digest(_settings(order, of=tuple(FeatureSection.model_fields)))


def _settings(order: BuildOrder, *, of: Collection[str]) -> dict[str, Any]:
    return {
        "decision": order.decision.model_dump(mode="json"),
        "labels": order.labels.model_dump(mode="json"),
        "features": order.features.model_dump(mode="json", include=set(of)),
        "training": [order.augmentation, order.negative_ratio],
        "seed": order.seed,
        "code": code_digest(),
    }


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
