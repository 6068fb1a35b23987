"""One file of installations and failures, as published, is inventory and events (``params/titan-mapping.yaml``)."""

from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest

from foundation.errors import InputError
from telemetry.importing.quarantine import BY_MAPPING
from telemetry.kernel_log.stamps import TWICE
from tests.telemetry.helpers import events_frame, gpu, inventory_frame, run_import

ROOT = Path(__file__).resolve().parents[3]
MAPPING = (ROOT / "params" / "titan-mapping.yaml").read_text()
PUBLISHED = ROOT.parent / "shared" / "data" / "titan-gpus" / "gc_full.csv"
ROWS = """SN,location,insert,remove,duration,out,event
0320117000060,c11-2c1s4n1,2017-04-09 21:36:19,2019-08-01 20:07:33,72916274,FALSE,
0323612016020,c21-5c1s2n3,2014-01-01 10:00:00,2016-02-03 04:05:06,1,TRUE,DBE
0323612016020,c21-5c1s2n3,,2015-02-03 04:05:06,,,OTB
"""


def test_a_row_is_a_stay_a_failure_or_both_and_its_texts_hold_numbers(tmp_path: Path):
    path = tmp_path / "gc_full.csv"
    path.write_text(ROWS)
    result = run_import(tmp_path, inventory=path, events=[path], mapping=MAPPING)
    left_out = {table: rows.left_out for table, rows in result.accounting.tables.items()}
    assert (result.quarantined, left_out) == ({}, {"inventory": {BY_MAPPING: 1}, "events": {BY_MAPPING: 1}})
    events, installations = result.dataset.events(), result.dataset.inventory().sort_values("gpu")
    assert events[["gpu", "type", "code"]].to_numpy().tolist() == [
        ["0323612016020", "failure", c] for c in ("OTB", "DBE")
    ]
    assert events["timestamp"].tolist() == [pd.Timestamp(f"{year}-02-03T09:05:06Z") for year in (2015, 2016)]
    assert installations["removed_at"].tolist() == [pd.NaT, pd.Timestamp("2016-02-03T09:05:06Z")]
    places = ["serial", "rack", "column", "row", "cage", "position", "made_week", "made_year", "made_number"]
    assert installations[places].iloc[0].tolist() == ["0320117000060", "c11-2", 11, 2, 1, 1, 1, 17, 60]


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published file is not on this machine")
def test_the_published_file_as_downloaded(tmp_path: Path):
    result = run_import(tmp_path, inventory=PUBLISHED, events=[PUBLISHED], mapping=MAPPING)
    assert (result.dataset.inventory()["gpu"].nunique(), len(result.dataset.events())) == (30_207, 6_309)
    assert (result.counts["overlapping_installations_ended"], result.quarantined["after removal"]) == (2, 33)
    assumed = {table: rows.assumed for table, rows in result.accounting.tables.items() if rows.assumed}
    assert assumed == {"inventory": {TWICE: 2}, "events": {TWICE: 2}}


def test_rows_that_are_none_of_the_table_do_not_dilute_its_losses(tmp_path: Path):
    rows = events_frame([("01:00", gpu(0), "failure", "DBE")] * 30).assign(timestamp="some day")
    quiet = events_frame([("01:00", gpu(0), "failure", "")] * 900)
    values = "events: {values: {code: {none: null}}}"
    for frame, mapping in ((quiet, "events: {drop_without: [code]}"), (quiet.assign(code="none"), values)):
        with pytest.raises(InputError, match=r"rows: 30 of 30 lost"):
            run_import(tmp_path, events=pd.concat([rows, frame]), mapping=mapping)
    with pytest.raises(InputError, match=r"missing column 'code'"):
        run_import(tmp_path, events=rows.drop(columns="code"), mapping="events: {drop_without: [code]}")


def test_a_constant_of_the_inventory_may_be_a_further_column(tmp_path: Path):
    one = events_frame([("01:00", gpu(0), "failure", "DBE")])
    result = run_import(tmp_path, inventory=inventory_frame(), events=one, mapping="inventory: {constants: {site: a}}")
    assert result.dataset.inventory()["site"].tolist() == ["a"] * 4


def test_a_date_that_ends_with_the_span_is_no_removal(tmp_path: Path):
    dated = inventory_frame(2).assign(removed_at=["2026-03-01", "2026-02-28"])
    zone = "time: {timezone: UTC}"
    mapping = f"{{inventory: {{{zone}}}, span: [2026-01-01T00:00:00Z, 2026-03-02T00:00:00Z]}}"
    installations = run_import(tmp_path, inventory=dated, mapping=mapping).dataset.inventory().sort_values("gpu")
    assert installations["removed_at"].tolist() == [pd.NaT, pd.Timestamp("2026-02-28T23:59:59.999Z")]


def test_an_event_dated_today_does_not_end_the_data_in_the_future(tmp_path: Path):
    today = events_frame([("01:00", gpu(0), "failure", "DBE")]).assign(timestamp="2026-03-01")
    now = datetime(2026, 3, 1, 9, tzinfo=UTC)
    mapping = "events: {time: {timezone: America/Los_Angeles}}"
    result = run_import(tmp_path, inventory=inventory_frame(), events=today, mapping=mapping, now=now)
    assert result.dataset.meta.span[1] == now
    assert len(result.dataset.events()) == 1
