"""The risk record: its JSON form, and what it refuses."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from policy.risk_record import ModelName, RiskReason, RiskRecord

T = datetime(2026, 1, 1, 6, tzinfo=UTC)
KNOWN = RiskRecord(
    unit="GPU-1", gpu="GPU-1", node="node07", slot="3", status="ok", unknown_reason=None, risk=0.125,
    risks={"1h": 0.01, "24h": 0.125}, score=-1.9459, rank=4, alert=True, tier="elevated", decision_time=T,
    issued_at=T + timedelta(minutes=12), expires_at=T + timedelta(hours=12), horizon=timedelta(hours=24),
    model=ModelName("ab" * 32, "mean_log_odds", 7), sample_age_seconds=600.0, completeness=0.9722,
    reasons=(RiskReason("ECC errors rose by 17,700", "telemetry", 0.4),),
)  # fmt: skip
UNKNOWN = replace(
    KNOWN, status="unknown", unknown_reason="no sample yet", risk=None, risks={}, score=None, rank=None, alert=False,
    tier="unknown", sample_age_seconds=None, completeness=0.0, reasons=(),
)  # fmt: skip


def test_the_json_form_is_the_contract() -> None:
    assert KNOWN.to_json() == {
        "format": 2,
        "unit": "GPU-1",
        "gpu": "GPU-1",
        "node": "node07",
        "slot": "3",
        "status": "ok",
        "unknown_reason": None,
        "risk": 0.125,
        "risks": {"1h": 0.01, "24h": 0.125},
        "score": -1.9459,
        "rank": 4,
        "alert": True,
        "tier": "elevated",
        "decision_time": "2026-01-01T06:00:00Z",
        "issued_at": "2026-01-01T06:12:00Z",
        "expires_at": "2026-01-01T18:00:00Z",
        "horizon_seconds": 86400.0,
        "model": {"digest": "ab" * 32, "profile": "mean_log_odds", "version": 7},
        "sample_age_seconds": 600.0,
        "completeness": 0.9722,
        "reasons": [{"text": "ECC errors rose by 17,700", "group": "telemetry", "share": 0.4, "channel": None}],
    }


@pytest.mark.parametrize("record", [KNOWN, UNKNOWN, replace(KNOWN, gpu=None, slot=None)])
def test_a_record_survives_a_round_trip(record: RiskRecord) -> None:
    text = json.dumps(record.to_json(), allow_nan=False)
    assert RiskRecord.from_json(json.loads(text)) == record


def test_fields_of_a_later_version_are_passed_over() -> None:
    assert RiskRecord.from_json({**KNOWN.to_json(), "rack": "r1"}) == KNOWN


@pytest.mark.parametrize(
    ("record", "change", "message"),
    [
        (KNOWN, {"risk": None}, "GPU-1 is ok, with risk None"),
        (UNKNOWN, {"risk": 0.5}, r"GPU-1 is unknown, with risk 0\.5"),
        (UNKNOWN, {"unknown_reason": None}, "GPU-1 is unknown, with the reason None"),
        (UNKNOWN, {"alert": True}, "GPU-1 is unknown, but has an alert"),
        (UNKNOWN, {"tier": "clear"}, "GPU-1 is unknown, of tier 'clear'"),
        (KNOWN, {"tier": "red"}, "GPU-1 is ok, of tier 'red'"),
        (KNOWN, {"risk": 1.5}, r"GPU-1 has a risk of 1\.5"),
        (KNOWN, {"score": float("nan")}, "GPU-1 has a score of nan"),
        (KNOWN, {"completeness": 1.2}, r"completeness of 1\.2"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(record: RiskRecord, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(record, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, "a risk record of format 1, but this code reads 2"),
        ({"node": ...}, "the risk record is damaged: node: Field required"),
        ({"risk": "0.1"}, "the risk record is damaged: risk: "),
        ({"alert": 1}, "the risk record is damaged: alert: "),
        ({"status": "fine"}, "the risk record is damaged: status: "),
        ({"risks": [1]}, "the risk record is damaged"),
        ({"horizon_seconds": 1e300}, "the risk record is damaged"),
        ({"expires_at": "2026-01-01T06:00:00"}, "a time without a time zone"),
        ({"expires_at": 5}, "the risk record is damaged"),
    ],
)
def test_damaged_records_are_refused(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RiskRecord.from_json({name: value for name, value in {**KNOWN.to_json(), **change}.items() if value is not ...})
