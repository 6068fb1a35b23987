"""Instants as tools, ticket systems and spreadsheets write them."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.errors import InputError
from telemetry.importing.instants import OK, PROBLEMS, parse_instants
from telemetry.importing.mapping import ImportMapping, TimeFormat
from telemetry.values.dates import read_dates

ZONE = TimeFormat(timezone=ZoneInfo("Europe/Berlin"))


def read(values: list[object], time: TimeFormat = ZONE) -> list[str]:
    parsed = parse_instants(pa.chunked_array([pa.array(values)]), time, "a.csv, column 't'")
    return [
        pd.Timestamp(ms, unit="ms").isoformat() if status == OK else PROBLEMS[int(status)]
        for ms, status in zip(parsed.ms.tolist(), parsed.status.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        ("09 Jan 2026", "2026-01-08T23:00:00"),
        ("9 January 2026 3:04 PM", "2026-01-09T14:04:00"),
        ("09/Jan/26 3:04 PM", "2026-01-09T14:04:00"),
        ("09-Jan-2026 15:04:05", "2026-01-09T14:04:05"),
        ("28/11/2026 14:05", "2026-11-28T13:05:00"),
        ("11/28/26 2:05 PM", "2026-11-28T13:05:00"),
        ("28.11.2026 14:05:06", "2026-11-28T13:05:06"),
        ("05.11.2026", "2026-11-04T23:00:00"),
        ("2026/11/01 00:00:00.123", "2026-10-31T23:00:00.123000"),
        ("20261101T000000Z", "2026-11-01T00:00:00"),
        ("20261101 140500", "2026-11-01T13:05:00"),
        ("20261101140500", "2026-11-01T13:05:00"),
        ("20261101", "2026-10-31T23:00:00"),
        ("Nov 1, 2026 02:20 PM", "2026-11-01T13:20:00"),
        ("November 1st, 2026 at 14:20", "2026-11-01T13:20:00"),
        ("Sun Nov  1 14:20:00 2026", "2026-11-01T13:20:00"),
        ("Sun Nov  1 14:20:00 UTC 2026", "2026-11-01T14:20:00"),
        ("Sun, 01 Nov 2026 14:20:00 +0200", "2026-11-01T12:20:00"),
        ("2026-11-01 14:20:00 CEST", "2026-11-01T12:20:00"),
        ("2026-11-01 14:20:00 PST", "2026-11-01T22:20:00"),
        ("2026-07-01 14:20:00 PST8PDT", "2026-07-01T21:20:00"),
        ("Wed Jul  1 14:20:00 EST5EDT 2026", "2026-07-01T18:20:00"),
        ("2026-11-01 14:20:00 America/New_York", "2026-11-01T19:20:00"),
        ("2026-11-01T14:20:00.5+01:00", "2026-11-01T13:20:00.500000"),
        (" 2026-11-01T07:20:00.000999-0500 ", "2026-11-01T12:20:00"),
        ("1. Dezember 2026 08:00", "2026-12-01T07:00:00"),
        ("3 août 2026 08:00", "2026-08-03T06:00:00"),
        ("14:05:00 28/11/2026", "2026-11-28T13:05:00"),
        ("1793541600", "2026-11-01T14:00:00"),
        ("1793541600123", "2026-11-01T14:00:00.123000"),
        ("1793541600123456", "2026-11-01T14:00:00.123000"),
        ("1793541600123456789", "2026-11-01T14:00:00.123000"),
        ("1.7935416E9", "2026-11-01T14:00:00"),
        ("46327.5", "2026-11-01T11:00:00"),
        ("46327,5", "2026-11-01T11:00:00"),
        ("46327.00694444", "2026-10-31T23:10:00"),
        ("2026-11-01 14:20:00 -0700 MST", "2026-11-01T21:20:00"),
        ("2026-11-01T14:20:00.5Z[UTC]", "2026-11-01T14:20:00.500000"),
        ("2026-11-01 14:20:00 GMT+1", "2026-11-01T13:20:00"),
        ("01-NOV-26 02.20.00.000000 PM", "2026-11-01T13:20:00"),
        ("2026-Nov-01 14:20", "2026-11-01T13:20:00"),
        ("01/Nov/2026:14:20:00 +0000", "2026-11-01T14:20:00"),
        ("01.11.2026, 14:20 Uhr", "2026-11-01T13:20:00"),
        ("2026-11-01T14Z", "2026-11-01T14:00:00"),
        ("13/11/2026 à 14h20", "2026-11-13T13:20:00"),
        ("1er novembre 2026 14:20", "2026-11-01T13:20:00"),
        ("1 de noviembre de 2026 14:20", "2026-11-01T13:20:00"),
        ("13/11/2026 02:20:00 p. m.", "2026-11-13T13:20:00"),
        ("2026年11月1日 14:20:00", "2026-11-01T13:20:00"),
        ("2026/11/1 下午 02:20:00", "2026-11-01T13:20:00"),
        ("2026-11-01 上午12:20", "2026-10-31T23:20:00"),
        ("2026년 11월 1일 오후 2:20", "2026-11-01T13:20:00"),
        ("Nov 1, 2026 @ 14:20:00.000", "2026-11-01T13:20:00"),
        ("Sun Nov 01 2026 14:20:00 GMT+0100 (Central European Standard Time)", "2026-11-01T13:20:00"),
        ("Fri 13 Nov 14:20:00 CET 2026", "2026-11-13T13:20:00"),
        ("vr 13 nov 2026 14:20", "2026-11-13T13:20:00"),
        ("13th of November 2026, 14:20", "2026-11-13T13:20:00"),
        ("2026-11-13 kl. 14:20", "2026-11-13T13:20:00"),
        ("20261101-14:20:00", "2026-11-01T13:20:00"),
        ("2026-11-01-14.20.00.000000", "2026-11-01T13:20:00"),
        ("2026-11-13T14:20:00\u221201:00", "2026-11-13T15:20:00"),
        ("2026-W48-5", "2026-11-26T23:00:00"),
        ("2026W485T142000Z", "2026-11-27T14:20:00"),
        ("2026-W53-7 14:20", "2027-01-03T13:20:00"),
        ("2026-332", "2026-11-27T23:00:00"),
        ("2024-366T14:20:00.5+01:00", "2024-12-31T13:20:00.500000"),
    ],
)
def test_a_form_is_the_instant_that_it_says(text: str, instant: str) -> None:
    assert read([text]) == [instant]


@pytest.mark.parametrize(
    "text",
    [
        *("yesterday", "31/02/2026 10:00", "2026-13-01 10:00", "29 Feb 2026", "25:00 28/02/2026", "13:00 PM"),
        *("2026-11-01 14:20:00 CST", "2026-11-01 10:00 Mars/Olympus", "Foo 1, 2026", "1/2", "n 1 2026", "9" * 400),
        *("2026-366", "2026-000", "2027-W53-1", "2026-W48", "2026-W48-8", "2026-1234"),
    ],
)
def test_what_is_no_instant_is_unreadable(text: str) -> None:
    assert read([text, "2026-11-01T00:00:00Z"])[0] == "unreadable timestamp"


@pytest.mark.parametrize(
    ("texts", "first"),
    [
        (["03/04/2026 10:00", "28/11/2026 14:05"], "2026-04-03T08:00:00"),
        (["03/04/2026 10:00", "11/28/2026 14:05"], "2026-03-04T09:00:00"),
        (["03.04.2026 10:00"], "2026-04-03T08:00:00"),
        (["04/04/2026 10:00"], "2026-04-04T08:00:00"),
    ],
)
def test_the_order_of_day_and_month_is_seen_from_the_column(texts: list[str], first: str) -> None:
    assert read(list(texts))[0] == first


def test_an_order_that_nothing_shows_is_asked_for() -> None:
    with pytest.raises(InputError, match=r"'03/04/2026 10:00' is ambiguous.*order: dmy"):
        read(["03/04/2026 10:00", "05/06/2026 11:00"])
    with pytest.raises(InputError, match="is ambiguous"):
        read(["28/11/2026 10:00", "11/28/2026 10:00", "05/06/2026 11:00"])
    chosen = {
        order: read(["03/04/2026"], TimeFormat(order=order, timezone=ZoneInfo("UTC"))) for order in ("dmy", "mdy")
    }
    assert chosen == {"dmy": ["2026-04-03T00:00:00"], "mdy": ["2026-03-04T00:00:00"]}


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC"])
def test_instants_far_outside_are_out_of_range_whatever_their_unit(unit: str, zone: str | None) -> None:
    column = pa.chunked_array([pa.array([-(2**63) + 1, 2**63 - 1, 2**53, -(2**53)]).cast(pa.timestamp(unit, zone))])
    parsed = parse_instants(column, ZONE, "a.parquet, column 't'")
    outside = [status != OK for status in parsed.status.tolist()]
    assert outside[0]
    assert outside[3]
    assert all(1990 <= pd.Timestamp(ms, unit="ms").year < 2262 for ms in parsed.ms[parsed.status == OK].tolist())


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 1e300, 2**53])
def test_numbers_far_outside_are_out_of_range(value: float) -> None:
    assert read([value], TimeFormat(unit="ms")) == ["timestamp out of range"]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(946_684_800, 2_840_000_000),
    st.sampled_from(
        ["%d %b %Y %H:%M:%S", "%b %d, %Y %I:%M:%S %p", "%Y/%m/%d %H:%M:%S", "%d.%m.%Y %H:%M:%S", "%Y%m%dT%H%M%S"]
    ),
)
def test_what_strftime_writes_is_read_back(seconds: int, form: str) -> None:
    when = datetime.fromtimestamp(seconds, UTC)
    assert read([when.strftime(form)], TimeFormat(timezone=ZoneInfo("UTC"))) == [when.replace(tzinfo=None).isoformat()]


def test_one_zone_holds_for_every_table_that_names_none() -> None:
    mapping = ImportMapping.model_validate(
        {"timezone": "Europe/Berlin", "events": {"time": {"timezone": "UTC"}}, "jobs": {"ignore_others": True}}
    )
    zones = [getattr(mapping, role).time.timezone for role in ("samples", "events", "inventory", "jobs")]
    assert [str(zone) for zone in (*zones, mapping.kernel_log.timezone)] == [
        "Europe/Berlin", "UTC", "Europe/Berlin", "Europe/Berlin", "Europe/Berlin"
    ]  # fmt: skip
    assert mapping.jobs.ignore_others


def test_dates_with_dots_are_day_first_whatever_the_others_show() -> None:
    dates = read_dates(["03.04.2026", "03/04/2026"], "mdy")
    assert pd.to_datetime(dates.ms, unit="ms").strftime("%Y-%m-%d").tolist() == ["2026-04-03", "2026-03-04"]
