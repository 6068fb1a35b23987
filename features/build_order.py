"""What a build is a function of: its order, and digests of all of it and of parts of it."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from features.config import DecisionSection, FeatureSection, Group, LabelSection
from telemetry.store import Place


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
    for path in sorted(Path(__file__).parent.glob("*.py")):
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
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
