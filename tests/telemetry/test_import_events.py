import json
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foundation.errors import InputError
from telemetry.dataset.schema import EVENTS
from telemetry.importing.quarantine import BY_MAPPING, NUMBER_AS_TYPE
from telemetry.kernel_log.reader import TABLE as KERNEL_LOG_LINES
from telemetry.kernel_log.stamps import SKIPPED, TWICE
from tests.telemetry.helpers import (
    DAY,
    events_frame,
    gpu,
    inventory_frame,
    quarantine_of,
    run_import,
    samples_frame,
    write_csv,
)


def test_events_and_inventory_are_a_dataset(tmp_path: Path):
    rows = [("00:05", gpu(0), "xid", "79"), ("02:00", None, "drain", "maintenance"), ("03:00", gpu(3), "repair", "x")]
    result = run_import(tmp_path, events=events_frame(rows))
    dataset = result.dataset
    assert (dataset.buckets(), dataset.meta.channels, dataset.meta.unit) == ([], {}, "gpu")
    assert dataset.meta.span == (DAY + timedelta(minutes=5), DAY + timedelta(hours=3))
    events = dataset.events()
    assert list(events.columns) == EVENTS.names
    assert events["node"].tolist() == ["node-0", "node-0", "node-1"]
    assert events["gpu"].isna().tolist() == [False, True, False]
    assert (events["known_at"] - events["timestamp"]).eq(pd.Timedelta(minutes=10)).all()
    assert events["source"].unique().tolist() == ["events.csv"]


def test_an_entry_time_is_kept_and_never_before_the_event(tmp_path: Path):
    frame = events_frame([("01:00", gpu(0), "failure", "DBE"), ("02:00", gpu(0), "failure", "DBE")])
    frame["known_at"] = ["2026-03-03T09:00:00Z", "2026-02-01T00:00:00Z"]
    result = run_import(tmp_path, events=frame)
    known = dict(zip(result.dataset.events()["timestamp"], result.dataset.events()["known_at"], strict=True))
    assert known[DAY + timedelta(hours=1)] == pd.Timestamp("2026-03-03T09:00Z")
    assert known[DAY + timedelta(hours=2)] == DAY + timedelta(hours=2)
    assert result.counts["known_at_before_the_event"] == 1


@pytest.mark.parametrize("suffix", [".csv", ".log"])
def test_local_times_at_a_clock_change_are_assumed_as_in_a_kernel_log(tmp_path: Path, suffix: str):
    zone = "timezone: Europe/Berlin\n"
    stamps = ["2025-03-30T02:30:00", "2025-10-26T02:30:00", "2025-10-26T03:30:00"]
    path = tmp_path / f"node-0{suffix}"
    if suffix == ".csv":
        events_frame([("00:00", gpu(0), "xid", "79")] * 3).assign(timestamp=stamps).to_csv(path, index=False)
    else:
        path.write_text("".join(f"{stamp} node-0 kernel: NVRM: Xid (PCI:0000:10:00): 79, x\n" for stamp in stamps))
    inventory = inventory_frame().assign(installed_at="2025-01-01T00:00:00Z")
    result = run_import(tmp_path, events=[path], inventory=inventory, mapping=zone)
    instants = [event.isoformat() for event in result.dataset.events()["timestamp"]]
    assert instants == ["2025-03-30T01:30:00+00:00", "2025-10-26T01:30:00+00:00", "2025-10-26T02:30:00+00:00"]
    assumed = sum((account.assumed for account in result.accounting.tables.values()), Counter())
    assert assumed == {TWICE: 1, SKIPPED: 1}


def test_ways_to_write_xids(tmp_path: Path):
    ways = [
        *(("xid", code, ["79"]) for code in ("79", "79.0", "XID 79", "xid79", "0079", "Xid 79: fallen off the bus")),
        *(("xid", code, ["48", "79"]) for code in ("79, 48", "79/48", "XID 79; XID 48", "[48, 79]")),
        ("Xid 79, then Xid 48 and 31 an hour later", None, ["31", "48", "79"]),
        ("XIDs: 48, 79", "79", ["79"]),
        ("repair", "", [""]),
    ]
    rows = [(f"{hour:02}:00", gpu(0), kind, code) for hour, (kind, code, _) in enumerate(ways)]
    result = run_import(tmp_path, events=events_frame(rows))
    events = result.dataset.events().fillna({"code": ""}).groupby("timestamp")["code"].agg(list)
    assert events.tolist() == [codes for *_, codes in ways]
    account = result.accounting.tables["events"]
    assert (account.read, account.unaccounted, result.quarantined) == (len(result.dataset.events()), 0, {})


UNUSABLE: list[tuple[dict[str, object], str]] = [
    ({"timestamp": None}, "missing timestamp"),
    ({"timestamp": "2025-12-24T00:00:00Z"}, "before installation"),
    ({"gpu": "GPU-unknown"}, "unknown gpu"),
    ({"gpu": None}, "missing node and gpu"),
    ({"gpu": None, "node": "node-7"}, "unknown node"),
    ({"gpu": None, "node": "node-0", "timestamp": "2025-12-24T00:00:00Z"}, "before installation"),
    ({"node": "node-1"}, "on another node than the inventory says"),
    ({"type": "1"}, NUMBER_AS_TYPE),
    ({"code": None}, "xid event without a code"),
    ({"known_at": "whenever"}, "unreadable timestamp in known_at"),
]


def test_an_event_that_cannot_be_used_is_set_aside(tmp_path: Path):
    rows = [("01:00", gpu(0), "xid", "79")] * len(UNUSABLE) + [("02:00", gpu(0), "xid", "48")]
    frame = events_frame(rows).assign(known_at=None).astype(object)
    for row, (values, _) in enumerate(UNUSABLE):
        for name, value in values.items():
            frame.loc[row, name] = value
    result = run_import(tmp_path, events=frame, max_loss=1.0)
    reasons = [reason for _, reason in UNUSABLE]
    assert result.quarantined == Counter(reasons)
    assert result.dataset.events()["code"].tolist() == ["48"]
    aside = quarantine_of(result).sort_values("row")
    assert aside[["table", "file", "row", "reason"]].to_numpy().tolist() == [
        ["events", "events.csv", row, reason] for row, reason in enumerate(reasons, 1)
    ]
    assert [json.loads(content)["timestamp"] for content in aside["content"]] == frame["timestamp"].tolist()[:-1]


def test_after_a_removal_only_the_work_on_the_part_goes_on(tmp_path: Path):
    inventory = inventory_frame()
    inventory["removed_at"] = ["2026-03-01T06:00:00Z", None, None, None]
    rows = [("07:00", gpu(0), "xid", "79"), ("08:00", gpu(0), "repair", "rma"), ("06:00", gpu(0), "replacement", "x")]
    result = run_import(tmp_path, events=events_frame(rows), inventory=inventory)
    assert result.quarantined == {"after removal": 1}
    assert result.dataset.events()["type"].tolist() == ["replacement", "repair"]
    assert result.dataset.events()["node"].tolist() == ["node-0", "node-0"]


def test_event_files_that_cannot_be_used(tmp_path: Path):
    good = events_frame([("01:00", gpu(0), "xid", "79")])
    for frame, texts in [
        (good.drop(columns="type"), "missing column 'type'"),
        (good.drop(columns=["node", "gpu"]), "missing column 'gpu'"),
        (good.assign(colour="red"), "1 unknown column: 'colour'"),
        (
            good.assign(type="1"),
            f"no event row can be used: 1 were quarantined, 1 of them for {NUMBER_AS_TYPE!r}",
        ),
        (good[:0], "no observations"),
    ]:
        with pytest.raises(InputError) as caught:
            run_import(tmp_path, events=frame)
        assert texts in str(caught.value)
    assert not (tmp_path / "dataset").exists()


def test_a_quiet_period_that_was_observed(tmp_path: Path):
    rules = "span: [2026-03-01T00:00:00Z, 2026-04-01T00:00:00Z]"
    result = run_import(tmp_path, events=events_frame([("01:00", gpu(0), "xid", "79")]), mapping=rules)
    assert result.dataset.meta.span == (DAY, pd.Timestamp("2026-04-01T00:00Z"))


def test_a_fault_trace_with_its_own_words(tmp_path: Path):
    trace = [
        {
            "node_id": "n1",
            "event_time": 1.5,
            "event_type": "fault_start",
            "fault_type": {"Class": "GPU", "Desc": "DBE"},
        },
        {"node_id": "n1", "event_time": 2.0, "event_type": "fault_end", "fault_type": {"Class": "GPU", "Desc": "DBE"}},
        {"node_id": "n1", "event_time": 2.5, "event_type": "ping", "fault_type": {"Class": "GPU", "Desc": "DBE"}},
    ]
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    rules = """
        events:
          columns:
            {node_id: node, event_time: timestamp, event_type: type, fault_type.Desc: code, fault_type.Class: detail}
          time: {unit: d, origin: 2024-03-30T00:00:00Z}
          values: {type: {fault_start: failure, fault_end: repair, ping: null}}
    """
    inventory = pd.DataFrame({"node": ["n1", "n2"], "installed_at": "2024-03-30T00:00:00Z"})
    result = run_import(tmp_path, events=[tmp_path / "trace.json"], inventory=inventory, mapping=rules)
    events = result.dataset.events()
    assert (result.dataset.meta.unit, result.accounting.tables["events"].left_out[BY_MAPPING]) == ("node", 1)
    assert events["type"].tolist() == ["failure", "repair"]
    assert events["timestamp"].tolist() == [pd.Timestamp("2024-03-31T12:00Z"), pd.Timestamp("2024-04-01T00:00Z")]
    assert events["detail"].tolist() == ["GPU", "GPU"]


def test_a_failure_and_its_repair_without_codes_are_two(tmp_path: Path):
    frame = events_frame([("01:00", gpu(0), "failure", ""), ("01:00", gpu(0), "repair", "")])
    result = run_import(tmp_path, events=frame)
    assert sorted(result.dataset.events()["type"]) == ["failure", "repair"]


def test_an_edge_of_the_gauge_is_left_out_only_where_another_source_reports_it(tmp_path: Path):
    frame = samples_frame(gpus=2, times=8).astype({"xid_last": object})
    frame.loc[frame["gpu"] == gpu(0), "xid_last"] = [0, 0, 79, 79, 0, 79, 48, None]
    frame.loc[frame["gpu"] == gpu(1), "xid_last"] = [31, 31, None, 31, 0, 0, 74, 0]
    alone = run_import(tmp_path, samples=frame, out="alone")
    events = alone.dataset.events()
    assert sorted(events["code"]) == ["48", "74", "79", "79"]
    assert (alone.counts["xids_from_gauge"], events["source"].unique().tolist()) == (4, ["xid_gauge"])
    given_events = events_frame([("00:11", gpu(0), "xid", "79"), ("01:00", gpu(0), "xid", "74")])
    both = run_import(tmp_path, samples=frame, events=given_events, out="both")
    kept = both.dataset.events()
    edges = kept[kept["source"] == "xid_gauge"]
    assert sorted(zip(edges["gpu"], edges["code"], edges["timestamp"].dt.minute, strict=True)) == [
        (gpu(0), "48", 0),
        (gpu(0), "79", 50),
        (gpu(1), "74", 0),
    ]
    assert both.counts["xids_from_gauge_told_elsewhere"] == 1
    for first, second in [
        ({"samples": frame}, {"events": given_events}),
        ({"events": given_events}, {"samples": frame}),
    ]:
        name = "-".join(first)
        run_import(tmp_path, **first, out=name)
        grown = run_import(tmp_path, **second, out=name)
        pd.testing.assert_frame_equal(grown.dataset.events(), kept)
        assert grown.counts["xids_from_gauge_told_elsewhere"] == 1


def test_an_entry_long_after_the_edge_does_not_take_it_away(tmp_path: Path):
    frame = samples_frame(gpus=1, times=4).assign(xid_last=[0, 0, 79, 79])
    late = events_frame([("00:15", gpu(0), "xid", "79")]).assign(known_at="2026-03-03T00:00:00Z")
    events = run_import(tmp_path, samples=frame, events=late).dataset.events()
    assert events["source"].tolist() == ["xid_gauge", "events.csv"]


def test_repeats_in_one_kernel_log_are_kept_also_on_import_again(tmp_path: Path):
    line = "2026-03-01T00:20:{:02d}+00:00 node-0 kernel: NVRM: Xid (PCI:0000:10:00): 74, pid=1, NVLink\n"
    log = tmp_path / "kernel.log"
    log.write_text("".join(line.format(second) for second in (0, 20, 40, 40)))
    result = run_import(tmp_path, events=[log])
    assert result.dataset.events()["timestamp"].dt.second.tolist() == [0, 20, 40]
    (tmp_path / "copy.log").write_text(log.read_text())
    ticket = write_csv(tmp_path / "tickets.csv", events_frame([("00:21", gpu(0), "xid", "74")]))
    again = run_import(tmp_path, events=[log, tmp_path / "copy.log", ticket])
    assert again.dataset.events()["timestamp"].dt.second.tolist() == [0, 20, 40]


def test_a_kernel_log_without_line_ends_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("telemetry.kernel_log.importing.MAX_LINE", 1000)
    log = tmp_path / "kernel.log"
    line = "2026-03-01T00:20:00+00:00 node-0 kernel: NVRM: Xid (PCI:0000:10:00): 74, pid=1, NVLink\n"
    log.write_text(line + "NVRM: Xid " * 10_000 + "\n" + line.replace("00:20", "00:21"))
    result = run_import(tmp_path, events=[log])
    assert result.dataset.events()["timestamp"].dt.minute.tolist() == [20, 21]
    assert result.accounting.tables[KERNEL_LOG_LINES].read == 3
    assert [len(content) for content in quarantine_of(result)["content"]] == [1000]


def test_jobs(tmp_path: Path):
    rows = [
        ("1", "node-0", 1, 2, 8),
        ("1", "node-1", 1, None, 8),
        ("2", "node-1", 3, 2, 4),
        ("3", "node-9", 3, None, None),
    ]
    jobs = pd.DataFrame(rows, columns=["job", "node", "started_at", "ended_at", "gpus"])
    for name in ("started_at", "ended_at"):
        jobs[name] = DAY + pd.to_timedelta(jobs[name], unit="h")
    jobs["checkpoint_every_s"] = [3600, None, 60, 60]
    result = run_import(tmp_path, samples=samples_frame(), jobs=write_csv(tmp_path / "jobs.csv", jobs))
    assert result.quarantined == {"job ends before it starts": 1, "unknown node": 1}
    stored = result.dataset.jobs()
    assert stored["node"].tolist() == ["node-0", "node-1"]
    assert stored["ended_at"].isna().tolist() == [False, True]
    assert stored["checkpoint_every_s"].fillna(-1).tolist() == [3600, -1]
    with pytest.raises(InputError, match="missing column 'started_at'"):
        run_import(tmp_path, jobs=write_csv(tmp_path / "j.csv", jobs.drop(columns="started_at")), out="other")


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array(["ECC", "b"], pa.string_view()), "ECC"),
        (pa.array([b"ECC", b"b"]), "ECC"),
        (pa.array([79, 1], pa.decimal128(5, 2)), "79"),
        (pa.array([b"\xff", b"b"]), "column 'detail'.*convert it"),
        (pa.array([["ECC"], []]), r"type list<element: string> are not read .*column 'detail'"),
        (pa.array([1, 2], pa.time32("s")), "type time32.* are not read .*column 'detail'"),
    ],
)
def test_a_parquet_column_of_another_type_is_text_or_named(tmp_path: Path, column: pa.Array, expected: str):
    given = {"timestamp": [DAY] * 2, "gpu": [gpu(0), gpu(1)], "type": ["failure"] * 2, "detail": column}
    pq.write_table(pa.table(given), tmp_path / "events.parquet")
    outcome = nullcontext() if expected.isalnum() else pytest.raises(InputError, match=expected)
    with outcome:
        result = run_import(tmp_path, events=[tmp_path / "events.parquet"])
        assert result.dataset.events()["detail"].tolist()[0] == expected


def test_half_a_surrogate_pair_in_json_is_replaced(tmp_path: Path):
    row = {"timestamp": "2026-03-01T01:00:00Z", "gpu": gpu(0), "type": "failure", "detail": "ECC \ud800"}
    (tmp_path / "events.json").write_text(json.dumps([row]))
    assert run_import(tmp_path, events=[tmp_path / "events.json"]).dataset.events()["detail"].tolist() == ["ECC ?"]


CALENDAR = """
events:
  columns: {start: timestamp, end: code, nodes: node, why: detail}
  constants: {type: maintenance}
  time: {timezone: Europe/Berlin}
"""


def calendar(*rows: tuple[str, str, str]) -> pd.DataFrame:
    return pd.DataFrame([(*row, "firmware") for row in rows], columns=["start", "end", "nodes", "why"])


def test_a_calendar_of_maintenance_names_nodes_patterns_and_racks(tmp_path: Path):
    inventory = inventory_frame().assign(rack=["r1", "r1", "r2", "r2"])
    frame = calendar(
        ("2026-03-01 09:00", "2026-03-01 13:00", "node-0"),
        ("2026-03-02 09:00", "2026-03-02 13:00", "node-*"),
        ("2026-03-03 09:00", "2026-03-03", "r2"),
        ("2027-03-03 09:00", "2027-03-03", "*"),
    )
    result = run_import(tmp_path, events=frame, inventory=inventory, mapping=CALENDAR)
    events = result.dataset.events()
    assert list(zip(events["node"], events["timestamp"].dt.day, events["code"], strict=True)) == [
        ("node-0", 1, "2026-03-01T12:00:00+00:00"),
        ("node-0", 2, "2026-03-02T12:00:00+00:00"),
        ("node-1", 2, "2026-03-02T12:00:00+00:00"),
        ("node-1", 3, "2026-03-03T22:59:59.999000+00:00"),
    ]
    assert events["type"].unique().tolist() == ["maintenance"]
    assert (result.quarantined, result.accounting.tables["events"].left_out) == ({}, {"a future maintenance": 2})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (("2026-03-01 09:00", "2026-03-01 08:00", "node-0"), "a maintenance that ends before it begins"),
        (("2026-03-01 09:00", "noon", "node-0"), "a maintenance whose code is not its end time"),
        (("2026-03-01 09:00", "", "node-0"), "a maintenance whose code is not its end time"),
        (("2026-03-01 09:00", "2026-03-01 13:00", "nowhere-*"), "unknown node"),
        (("2025-03-01 09:00", "2025-03-01 13:00", "*"), "before installation"),
    ],
)
def test_a_maintenance_that_cannot_be_used_is_set_aside(row: tuple[str, str, str], reason: str, tmp_path: Path):
    good = ("2026-03-02 09:00", "2026-03-02 13:00", "node-1")
    result = run_import(tmp_path, events=calendar(row, good), mapping=CALENDAR)
    assert result.quarantined == {reason: 1}
    assert result.dataset.events()["node"].tolist() == ["node-1"]


def test_a_maintenance_may_be_told_of_by_its_begin_and_its_end(tmp_path: Path):
    rows = [
        ("00:05", None, "maintenance", "begin"),
        ("02:00", None, "maintenance", "End"),
        ("03:00", gpu(0), "xid", "79"),
    ]
    assert run_import(tmp_path, events=events_frame(rows)).dataset.events()["code"].tolist() == ["begin", "End", "79"]
