from datetime import UTC, datetime

import pandas as pd
import pyarrow as pa
import pytest

from telemetry.errors import InputError
from telemetry.importing.instants import PROBLEMS, parse_instants
from telemetry.importing.mapping import TimeFormat

NOON = int(pd.Timestamp("2026-03-01T12:00:00Z").timestamp() * 1000)


def parse(values: list[object] | pa.Array, time: TimeFormat | None = None) -> list[int | str]:
    column = pa.chunked_array([values if isinstance(values, pa.Array) else pa.array(values)])
    found = parse_instants(column, time or TimeFormat(), "file")
    return [
        PROBLEMS[status] if status else ms - NOON
        for ms, status in zip(found.ms.tolist(), found.status.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "2026-03-01T12:00:00Z",
        "2026-03-01 12:00:00+00:00",
        "2026-03-01T13:00:00+01:00",
        "2026-03-01T07:00:00-0500",
        "2026-03-01 12:00:00 UTC",
        "20260301T120000Z",
        " 2026-03-01T12:00:00.000999Z ",
    ],
)
def test_ways_to_write_one_instant(text: str):
    assert parse([text]) == [0]


def test_mixed_offsets_become_utc_and_naive_ones_among_them_are_marked():
    assert parse(["2026-03-01T13:00:00+01:00", "2026-03-01T12:00:01Z", "2026-03-01T12:00:00", None, "", "soon"]) == [
        0,
        1000,
        "naive timestamp",
        "missing timestamp",
        "missing timestamp",
        "unreadable timestamp",
    ]


def test_a_zone_of_the_mapping_and_the_hours_it_has_twice_or_never():
    berlin = TimeFormat(timezone="Europe/Berlin")
    texts = ["2026-03-01T13:00:00", "2026-10-25T02:30:00", "2026-03-29T02:30:00", "2026-03-01T12:00:00Z"]
    assert parse(texts, berlin) == [0, "ambiguous local time", "ambiguous local time", 0]


def test_numbers_need_a_unit():
    with pytest.raises(InputError, match=r"numbers such as 1772366400, without a unit.*unit: s"):
        parse([1772366400])
    with pytest.raises(InputError, match=r"unit: ms"):
        parse(["1772366400000"])
    assert parse([NOON // 1000], TimeFormat(unit="s")) == [0]
    assert parse([str(NOON * 1_000_000 + 999_999)], TimeFormat(unit="ns")) == [0]
    assert parse([NOON / 1000 + 0.25, None, float("nan"), 1e300], TimeFormat(unit="s"))[:2] == [
        250,
        "missing timestamp",
    ]


def test_days_since_an_origin():
    days = TimeFormat(unit="d", origin=datetime(2026, 3, 1, tzinfo=UTC))
    assert parse([0.5, 1.0], days) == [0, 12 * 3_600_000]
    assert parse(["0.5", "later"], days) == [0, "unreadable timestamp"]


def test_a_format_of_the_mapping():
    assert parse(["01.03.2026 13:00"], TimeFormat(format="%d.%m.%Y %H:%M", timezone="Europe/Berlin")) == [0]
    assert parse(["01.03.2026 13:00 +0100"], TimeFormat(format="%d.%m.%Y %H:%M %z")) == [0]
    assert parse(["01.03.2026 13:00"], TimeFormat(format="%d.%m.%Y %H:%M")) == ["naive timestamp"]


def test_arrow_types():
    noon = datetime.fromisoformat("2026-03-01T12:00:00")
    assert parse(pa.array([noon.replace(tzinfo=UTC)], pa.timestamp("us", tz="Europe/Berlin"))) == [0]
    assert parse(pa.array([noon, None], pa.timestamp("ns"))) == ["naive timestamp", "missing timestamp"]
    assert parse(pa.array([noon], pa.timestamp("s")), TimeFormat(timezone="UTC")) == [0]
    assert parse(pa.nulls(1)) == ["missing timestamp"]


def test_a_clock_that_was_never_set():
    assert parse(["1970-01-01T00:10:00Z", "2150-01-01T00:00:00Z"]) == ["timestamp out of range"] * 2
