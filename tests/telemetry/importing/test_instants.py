from datetime import UTC, date, datetime, timedelta

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foundation.errors import InputError
from telemetry.importing.instants import PROBLEMS, parse_instants
from telemetry.importing.mapping import TimeFormat

NOON = int(pd.Timestamp("2026-03-01T12:00:00Z").timestamp() * 1000)


def parse(values: list[object] | pa.Array, time: TimeFormat | None = None, day_end: bool = False) -> list[int | str]:
    column = pa.chunked_array([values if isinstance(values, pa.Array) else pa.array(values)])
    parsed = parse_instants(column, time or TimeFormat(), "file", day_end=day_end)
    return [
        PROBLEMS[status] if status else ms - NOON
        for ms, status in zip(parsed.ms.tolist(), parsed.status.tolist(), strict=True)
    ]


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
    assert parse(texts, berlin) == [0, "ambiguous local time", "local time that the clock change skips", 0]


def test_numbers_need_a_unit():
    with pytest.raises(InputError, match=r"numbers such as 4200, without a unit.*unit: d"):
        parse([4200])
    with pytest.raises(InputError, match="without a unit"):
        parse([NOON // 1000, NOON])
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
    with pytest.raises(InputError, match=r"'Q' is a bad directive.*time: \{format"):
        parse(["01.03.2026"], TimeFormat(format="%Q"))


def test_arrow_types():
    noon = datetime.fromisoformat("2026-03-01T12:00:00")
    assert parse(pa.array([noon.replace(tzinfo=UTC)], pa.timestamp("us", tz="Europe/Berlin"))) == [0]
    assert parse(pa.array([noon, None], pa.timestamp("ns"))) == ["naive timestamp", "missing timestamp"]
    assert parse(pa.array([noon], pa.timestamp("s")), TimeFormat(timezone="UTC")) == [0]
    assert parse(pa.nulls(1)) == ["missing timestamp"]


def test_a_clock_that_was_never_set():
    never = ["1970-01-01T00:10:00Z", "1980-01-06T00:00:00Z", "2150-01-01T00:00:00Z"]
    assert parse(never) == ["timestamp out of range"] * 3
    assert isinstance(parse(["1990-01-01T00:00:00Z"])[0], int)  # files of old fleets have any time after it


@given(
    day=st.dates(date(1991, 1, 1), date(2035, 12, 31)),
    zone=st.sampled_from(["UTC", "America/New_York", "Asia/Kathmandu", "America/Sao_Paulo", "Africa/Cairo"]),
    form=st.sampled_from([None, "%d.%m.%Y", "arrow"]),
)
@example(day=date(2017, 10, 15), zone="America/Sao_Paulo", form=None)  # has no midnight
@example(day=date(2018, 2, 17), zone="America/Sao_Paulo", form="%d.%m.%Y")  # has its last hour twice
def test_an_event_of_a_date_is_at_the_end_of_that_day_in_its_zone(day: date, zone: str, form: str | None):
    texts = pa.array([day], pa.date32()) if form == "arrow" else pa.array([day.strftime(form or "%Y-%m-%d")])
    time = TimeFormat(timezone=zone, format=None if form == "arrow" else form)
    (end,), (start,) = parse(texts, time, day_end=True), parse(texts, time)
    local = [pd.Timestamp(NOON + ms, unit="ms", tz="UTC").tz_convert(zone).date() for ms in (start, end, end + 1)]
    assert local == [day, day, day + timedelta(days=1)]
    exact = pa.array([f"{day.isoformat()}T12:00:00"])
    assert parse(exact, TimeFormat(timezone=zone), day_end=True) == parse(exact, TimeFormat(timezone=zone))
