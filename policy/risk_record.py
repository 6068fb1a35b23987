"""Risk record of one unit at one decision time, with expiry: written by batch scoring, read by schedulers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    StrictBool,
    StrictFloat,
    StrictInt,
    TypeAdapter,
    ValidationError,
)

from policy.tiers import TIERS, UNKNOWN, Tier

FORMAT = 2
"""Format version; readers reject any other."""

MISSING_CHANNELS = "missing_channels"
"""Key of ``summary.json``: channels that the model was trained on and that are missing now. They open the breaker."""

MAX_HORIZON = timedelta(days=366)


def format_utc(value: datetime) -> str:
    """Format an aware instant as ISO 8601 in UTC, in whole seconds, with Z.

    >>> format_utc(datetime(2026, 1, 1, 6, tzinfo=UTC))
    '2026-01-01T06:00:00Z'
    """
    return value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def parse_utc(text: Any) -> datetime:
    """Parse an ISO 8601 time with a zone to UTC; raises ``ValueError`` if invalid or without a zone."""
    try:
        instant = datetime.fromisoformat(text)
        utc = instant.astimezone(UTC)
    except (TypeError, OverflowError):
        raise ValueError(f"{text!r} is not a time") from None
    if instant.tzinfo is None:
        raise ValueError(f"a time without a time zone, {text}")
    return utc


def _duration(seconds: float) -> timedelta:
    try:
        return timedelta(seconds=seconds)
    except (TypeError, OverflowError):
        raise ValueError(f"{seconds!r} is not a number of seconds") from None


Instant = Annotated[datetime, BeforeValidator(parse_utc), PlainSerializer(format_utc)]
Seconds = Annotated[timedelta, BeforeValidator(_duration), PlainSerializer(timedelta.total_seconds)]


@dataclass(frozen=True, slots=True)
class ModelName:
    """Model that produced a risk.

    ``version``: version in the registry; None for a bundle from a folder.
    """

    digest: str
    profile: str
    version: StrictInt | None = None


@dataclass(frozen=True, slots=True)
class RiskReason:
    """One contribution to a risk.

    ``share``: share of all contributions that raise the score, 0 to 1.
    ``channel``: telemetry channel; None: not from telemetry.
    """

    text: str
    group: str
    share: Annotated[StrictFloat, Field(allow_inf_nan=False)]
    channel: str | None = None


@dataclass(frozen=True, slots=True)
class RiskRecord:
    """Prediction for one unit at one decision time.

    ``unit``: the GPU, or the node in a fleet without GPUs.
    ``gpu``: None if the unit is the node.
    ``status``: ``ok``, or ``unknown``: no risk, which must not be read as a low one.
    ``risk``: calibrated probability that an incident starts in (t + gap, t + gap + horizon].
    ``risks``: the same for other horizons, by length in hours (``6h``); empty if the bundle has none.
    ``score``: orders the units of this decision time.
    ``rank``: 1 is the riskiest.
    ``alert``: whether the model selects the unit within its alert budget.
    ``tier``: one of :data:`policy.tiers.TIERS`, or ``unknown``.
    ``decision_time``, ``issued_at``, ``expires_at``: aware, whole seconds. The record is invalid from ``expires_at``.
    ``sample_age_seconds``: age of the unit's latest usable sample at the decision time; None: no sample.
    ``completeness``: share of the expected samples in the last decision interval, 0 to 1.
    Raises ``ValueError`` for inconsistent fields, such as a risk with status ``unknown``.
    """

    unit: str
    gpu: str | None
    node: str
    slot: str | None
    status: Literal["ok", "unknown"]
    unknown_reason: str | None
    risk: StrictFloat | None
    risks: Mapping[str, StrictFloat]
    score: StrictFloat | None
    rank: StrictInt | None
    alert: StrictBool
    tier: Tier
    decision_time: Instant
    issued_at: Instant
    expires_at: Instant
    horizon: Annotated[Seconds, Field(alias="horizon_seconds")]
    model: ModelName
    sample_age_seconds: StrictFloat | None
    completeness: StrictFloat
    reasons: tuple[RiskReason, ...] = ()

    def __post_init__(self) -> None:
        known, named = self.status == "ok", f"{self.unit} is {self.status}"
        if known in (self.risk is None, self.score is None, self.rank is None):
            raise ValueError(f"{named}, with risk {self.risk}, score {self.score}, rank {self.rank}")
        if known == (self.unknown_reason is not None):
            raise ValueError(f"{named}, with the reason {self.unknown_reason!r}")
        if not known and (self.alert or self.risks or self.reasons):
            raise ValueError(f"{self.unit} is unknown, but has an alert, other risks or reasons")
        if known != (self.tier != UNKNOWN) or (known and self.tier not in TIERS):
            raise ValueError(f"{named}, of tier {self.tier!r}")
        for name, share in [("risk", self.risk), *self.risks.items(), ("completeness", self.completeness)]:
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{self.unit} has a {name} of {share}")
        for name, number in (("score", self.score), ("sample age", self.sample_age_seconds)):
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{self.unit} has a {name} of {number}")
        if not timedelta(0) < self.horizon <= MAX_HORIZON:
            raise ValueError(f"{self.unit} has a horizon of {self.horizon}: expected up to {MAX_HORIZON.days} days")

    def expired(self, now: datetime) -> bool:
        """Return whether the record has expired at ``now`` (aware)."""
        return now >= self.expires_at

    def to_json(self) -> dict[str, Any]:
        """Convert to a JSON object: times in ISO 8601 with Z, durations in seconds, no NaN."""
        return {"format": FORMAT, **_codec().dump_python(self, mode="json", by_alias=True)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "RiskRecord":
        """Parse the output of :meth:`to_json`; unknown fields are ignored for forward compatibility.

        Raises ``ValueError`` if the format differs, or a field is missing, invalid or inconsistent.
        """
        if not isinstance(content, Mapping) or content.get("format") != FORMAT:
            version = content.get("format") if isinstance(content, Mapping) else content
            raise ValueError(f"a risk record of format {version!r}, but this code reads {FORMAT}")
        try:
            return _codec().validate_python(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            message = first["msg"].removeprefix("Value error, ")
            location = ": ".join(map(str, first["loc"]))
            raise ValueError(f"the risk record is damaged: {location}: {message}" if location else message) from None


@cache
def _codec() -> TypeAdapter[RiskRecord]:
    return TypeAdapter(RiskRecord)
