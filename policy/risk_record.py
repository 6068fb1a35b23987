"""The risk record: what is known of one unit at one decision time. Serving writes it, schedulers read it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from policy.tiers import TIERS, UNKNOWN, Tier

FORMAT = 2
"""Version of the record; a reader refuses any other."""

LONGEST_HORIZON = timedelta(days=366)


@dataclass(frozen=True, slots=True)
class ModelName:
    """Which model a risk is from.

    ``digest``: SHA-256 of the bundle's manifest.
    ``profile``: the model of the bundle whose risks these are.
    ``version``: its version in the registry; None for a bundle from a folder.
    """

    digest: str
    profile: str
    version: int | None = None


@dataclass(frozen=True, slots=True)
class RiskReason:
    """One thing that raised a risk.

    ``text``: in plain words with the numbers.
    ``group``: the feature group it belongs to.
    ``share``: its share of all that raised the score, 0 to 1.
    """

    text: str
    group: str
    share: float


@dataclass(frozen=True, slots=True)
class RiskRecord:
    """What is known of one unit at one decision time.

    ``unit``: the GPU, or the node where a fleet has no GPUs.
    ``gpu``: the GPU; None where the unit is the node.
    ``node``: where the unit is.
    ``status``: ``ok``, or ``unknown``: no risk is given, and nothing may be concluded.
    ``unknown_reason``: in words; None for ``ok``.
    ``risk``: calibrated probability that an incident starts in (t + gap, t + gap + horizon].
    ``risks``: the same over other horizons, by their length in hours (``6h``); empty where the bundle gives none.
    ``score``: what orders the units of this decision time.
    ``rank``: 1 for the riskiest.
    ``alert``: whether the model selects the unit within its alert budget.
    ``tier``: one of :data:`policy.tiers.TIERS`, or ``unknown``.
    ``decision_time``, ``issued_at``, ``expires_at``: Aware, whole seconds. After ``expires_at`` the record says
    nothing.
    ``sample_age_seconds``: age of the unit's newest usable sample at the decision time; None: it has none.
    ``completeness``: share of the expected samples in the last decision interval, 0 to 1.
    Raises ``ValueError`` if the fields contradict each other: a risk of an unknown unit, none of a known one, a time
    without a zone.
    """

    unit: str
    gpu: str | None
    node: str
    slot: str | None
    status: Literal["ok", "unknown"]
    unknown_reason: str | None
    risk: float | None
    risks: Mapping[str, float]
    score: float | None
    rank: int | None
    alert: bool
    tier: Tier
    decision_time: datetime
    issued_at: datetime
    expires_at: datetime
    horizon: timedelta
    model: ModelName
    sample_age_seconds: float | None
    completeness: float
    reasons: tuple[RiskReason, ...] = ()

    def __post_init__(self) -> None:
        known, named = self.status == "ok", f"{self.unit} is {self.status}"
        if self.status not in ("ok", "unknown"):
            raise ValueError(f"a status of {self.status!r}: give ok or unknown")
        if known in (self.risk is None, self.score is None, self.rank is None):
            raise ValueError(f"{named}, with risk {self.risk}, score {self.score}, rank {self.rank}")
        if known == (self.unknown_reason is not None):
            raise ValueError(f"{named}, with the reason {self.unknown_reason!r}")
        if not known and (self.alert or self.risks or self.reasons):
            raise ValueError(f"{self.unit} is unknown, and yet alerted, given other risks or explained")
        if known != (self.tier != UNKNOWN) or (known and self.tier not in TIERS):
            raise ValueError(f"{named}, of tier {self.tier!r}")
        for name, share in [("risk", self.risk), *self.risks.items(), ("completeness", self.completeness)]:
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{self.unit} has a {name} of {share}")
        for name, number in (("score", self.score), ("sample age", self.sample_age_seconds)):
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{self.unit} has a {name} of {number}")
        if not timedelta(0) < self.horizon <= LONGEST_HORIZON:
            raise ValueError(f"{self.unit} has a horizon of {self.horizon}: expected up to {LONGEST_HORIZON.days} days")
        for name in ("decision_time", "issued_at", "expires_at"):
            if getattr(self, name).tzinfo is None:
                raise ValueError(f"{name} has no time zone")

    def expired(self, now: datetime) -> bool:
        """Tell whether the record says nothing any more at ``now`` (aware)."""
        return now >= self.expires_at

    def to_json(self) -> dict[str, Any]:
        """Give the record as a JSON object: times in ISO 8601 with Z, durations in seconds, no NaN."""
        return {
            "format": FORMAT,
            "unit": self.unit,
            "gpu": self.gpu,
            "node": self.node,
            "slot": self.slot,
            "status": self.status,
            "unknown_reason": self.unknown_reason,
            "risk": self.risk,
            "risks": dict(self.risks),
            "score": self.score,
            "rank": self.rank,
            "alert": self.alert,
            "tier": self.tier,
            "decision_time": instant_words(self.decision_time),
            "issued_at": instant_words(self.issued_at),
            "expires_at": instant_words(self.expires_at),
            "horizon_seconds": self.horizon.total_seconds(),
            "model": {"digest": self.model.digest, "profile": self.model.profile, "version": self.model.version},
            "sample_age_seconds": self.sample_age_seconds,
            "completeness": self.completeness,
            "reasons": [{"text": each.text, "group": each.group, "share": each.share} for each in self.reasons],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RiskRecord:
        """Read what :meth:`to_json` wrote.

        Raises ``ValueError`` if it is of another format, or a field is missing, of another kind, or contradicts another
        one. Fields that are not known are passed over: a later version may add some.
        """
        if not isinstance(content, Mapping) or content.get("format") != FORMAT:
            found = content.get("format") if isinstance(content, Mapping) else content
            raise ValueError(f"a risk record of format {found!r}, this code reads {FORMAT}")
        try:
            plain = {name: _plain(content, name, kind) for name, kind in _PLAIN.items()}
            return cls(
                **plain,
                risks={str(name): float(risk) for name, risk in content["risks"].items()},
                decision_time=_instant(content["decision_time"]),
                issued_at=_instant(content["issued_at"]),
                expires_at=_instant(content["expires_at"]),
                horizon=timedelta(seconds=content["horizon_seconds"]),
                model=ModelName(content["model"]["digest"], content["model"]["profile"], content["model"]["version"]),
                reasons=tuple(
                    RiskReason(str(r["text"]), str(r["group"]), float(r["share"])) for r in content["reasons"]
                ),
            )
        except KeyError as error:
            raise ValueError(f"the risk record lacks {error}") from None
        except (TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"the risk record is damaged: {error}") from None


_TEXT, _MAYBE_TEXT = (str,), (str, type(None))
_MAYBE_NUMBER = (float, int, type(None))
_PLAIN: dict[str, tuple[type, ...]] = {
    "unit": _TEXT, "gpu": _MAYBE_TEXT, "node": _TEXT, "slot": _MAYBE_TEXT, "status": _TEXT,
    "unknown_reason": _MAYBE_TEXT, "risk": _MAYBE_NUMBER, "score": _MAYBE_NUMBER, "rank": (int, type(None)),
    "alert": (bool,), "tier": _TEXT, "sample_age_seconds": _MAYBE_NUMBER, "completeness": (float, int),
}  # fmt: skip


def _plain(content: Mapping[str, Any], name: str, kinds: tuple[type, ...]) -> Any:
    value = content[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"{name} is {value!r}")
    return value


def instant_words(value: datetime) -> str:
    """Write an aware instant as ISO 8601 in UTC, whole seconds, with Z.

    Examples
    --------
    >>> instant_words(datetime(2026, 1, 1, 6, tzinfo=UTC))
    '2026-01-01T06:00:00Z'
    """
    return value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def _instant(text: str) -> datetime:
    when = datetime.fromisoformat(text)
    if when.tzinfo is None:
        raise ValueError(f"a time without a zone, {text}")
    return when.astimezone(UTC)
