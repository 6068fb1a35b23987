"""One kernel message in every form in which tools write it gives one event: its instant, its node, its GPU."""

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pandas as pd
import pytest

from telemetry.accounting import as_text
from telemetry.kernel_log import stamps
from telemetry.kernel_log.importing import KernelLog, parse_kernel_log
from telemetry.kernel_log.reader import TABLE
from telemetry.kernel_log.stamps import SKIPPED, TWICE, parse_header
from tests.realworld.kernel_log.forms import BOOT_TIME, EPOCH_S, FORMS, LINE, WHEN, WHOLE, XID, wrapped
from tests.telemetry.helpers import DAY, gpu, run_import


def documents(form: str) -> list[object]:
    """Return a form and its like of another GPU as JSON documents; empty if it is not JSON."""
    try:
        return [json.loads(form), json.loads(form.replace("0000:10:00", "0000:20:00"))]
    except ValueError:
        return []


MANY_DOCUMENTS = {
    f"{name}, {kind}": separator.join(json.dumps(document, indent=indent) for document in documents(form))
    for name, form in WHOLE.items()
    for kind, indent, separator in (
        ("pretty", 4, "\n"),
        ("pretty without line ends", 2, ""),
        ("in one line", None, " "),
    )
    if documents(form) and "bytes" not in name
}
RULES = f"kernel_log: {{node: node-0, timezone: UTC, reference_time: 2026-03-02T00:00:00Z, boot_time: {BOOT_TIME}}}"


def parsed(text: str, node: str) -> KernelLog:
    then, booted = datetime(2026, 3, 2, tzinfo=UTC), datetime.fromisoformat(BOOT_TIME)
    return parse_kernel_log(text.split("\n"), node=node, timezone=UTC, reference_time=then, boot_time=booted)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_event_its_instant_and_its_node(form: str) -> None:
    log = parsed(FORMS[form], "here")
    assert log.unparsed == []
    (event,) = log.events.to_dict("records")
    assert abs(event["timestamp"] - WHEN) < timedelta(seconds=1)
    assert (event["type"], event["code"], event["pci_bus_id"]) == ("xid", "79", "00000000:10:00")
    assert event["detail"].startswith("GPU has fallen off the bus.")
    names_node = "node-0" in FORMS[form].lower()
    assert event["node"].lower().split(".")[0] == ("node-0" if names_node else "here")
    assert log.accounting.tables["kernel log lines"].unaccounted == 0


@pytest.mark.parametrize("form", MANY_DOCUMENTS)
def test_documents_in_one_file_are_all_read(form: str) -> None:
    log = parsed(MANY_DOCUMENTS[form], "node-0")
    events = log.events.sort_values("pci_bus_id")
    assert events["pci_bus_id"].tolist() == ["00000000:10:00", "00000000:20:00"]
    assert set(zip(events["node"], events["code"], strict=True)) == {("node-0", "79")}
    assert (events["timestamp"] - WHEN).abs().max() < timedelta(seconds=1)
    assert log.unparsed == []


def test_forms_in_files_reach_the_dataset(tmp_path: Path) -> None:
    for number, text in enumerate(FORMS.values()):
        (tmp_path / f"form-{number}.log").write_text(text + "\n")
    files = sorted(tmp_path.glob("form-*.log"))
    result = run_import(tmp_path, events=files, mapping=RULES)
    events = result.dataset.events()
    assert set(zip(events["node"], events["gpu"], events["code"], strict=True)) == {("node-0", gpu(0), "79")}
    assert (events["timestamp"] - WHEN).abs().max() < timedelta(seconds=1)
    read = result.accounting.tables["events"].read
    assert (read, result.quarantined) == (len(set(FORMS.values())), {})  # copies of a file count once


AM = '"3/1/2026, 2:20:00.000 AM"'
TABLES = {
    "Splunk": f'"_raw","_time",host,source\n"{LINE}","2026-03-01T02:20:00.000+0000",node-0,/var/log/kern.log\n',
    "Kibana": f'"@timestamp","host.name",message\n"Mar 1, 2026 @ 02:20:00.000",node-0,"{XID}"\n',
    "Datadog": f'Date,Host,Service,Message\n2026-03-01T02:20:00.000Z,node-0,kernel,"{XID}"\n',
    "Azure": f'TimeGenerated [UTC],Computer,SyslogMessage,Type\n{AM},node-0,"{XID}",\n"3/13/2026, 2:20",,,\n',
    "Graylog": f'timestamp,source,message\n2026-03-01T02:20:00.000Z,node-0,"{XID}"\n',
    "Grafana": f'Line,Time,labels\n"{XID}",{EPOCH_S}000,"{{""host"":""node-0""}}"\n',
    "CloudWatch": f'timestamp,message,logStreamName\n{EPOCH_S}000,"{XID}",node-0\n',
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_a_csv_of_a_log_store_is_a_kernel_log(tmp_path: Path, name: str) -> None:
    (tmp_path / "node-9.csv").write_text(TABLES[name])
    events = run_import(
        tmp_path, events=[tmp_path / "node-9.csv"], mapping="kernel_log: {timezone: UTC}"
    ).dataset.events()
    assert events[["timestamp", "node", "gpu", "type", "code"]].to_numpy().tolist() == [
        [WHEN, "node-0", gpu(0), "xid", "79"]
    ]


def test_each_row_of_a_table_in_json_is_an_entry() -> None:
    names = [{"name": name} for name in ("TimeGenerated", "Computer", "SyslogMessage")]
    rows = [[f"2026-03-01T02:2{number}:00Z", f"node-{number}", XID] for number in range(2)]
    log = parse_kernel_log([wrapped(tables=[{"columns": names, "rows": rows}])])
    assert log.events["node"].tolist() == ["node-0", "node-1"]


def wide(**fields: object) -> list[dict[str, object]]:
    """Return a log of more than a mebibyte, whose last message is an XID."""
    return [fields, *({**fields, "message": f"usb 1-1: device {number}" + 100 * "."} for number in range(10_000))][::-1]


DOCUMENTS = {
    # https://cloud.google.com/logging/docs/reference/v2/rest/v2/LogEntry
    "Google Cloud": [
        {"jsonPayload": {"message": XID}, "timestamp": "2026-03-01T02:20:00Z", "insertId": "a", "severity": "ERROR"}
        | {"resource": {"type": "k8s_node", "labels": {"node_name": "node-0"}}}
    ],
    # https://www.elastic.co/guide/en/beats/filebeat/current/filebeat-input-journald.html
    "Elastic": {
        "took": 1,
        "hits": {
            "hits": [
                {"_index": "logs", "_source": record | {"input": {"type": "journald"}}}
                for record in wide(message=XID, host={"name": "node-0"}, **{"@timestamp": "2026-03-01T02:20:00Z"})
            ]
        },
    },
    # https://learn.microsoft.com/azure/azure-monitor/logs/api/response-format
    "Azure Monitor": {
        "tables": [
            {
                "name": "PrimaryResult",
                "columns": [
                    {"name": name, "type": "string"} for name in ("TimeGenerated", "Computer", "SyslogMessage")
                ],
                "rows": [["2026-03-01T02:20:00Z", "node-0", XID]],
            }
        ]
    },
    # https://grafana.com/docs/loki/latest/reference/loki-http-api/#query-logs-within-a-range-of-time
    "Loki": {
        "status": "success",
        "data": {
            "resultType": "streams",
            "result": [
                {
                    "stream": {"host": "node-0"},
                    "values": [[f"{EPOCH_S}000000000", row["message"]] for row in wide(message=XID)],
                }
            ],
        },
    },
    "CloudWatch": {"events": wide(logStreamName="node-0", timestamp=EPOCH_S * 1000, message=XID, eventId="3")},
}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_an_answer_of_a_log_store_is_read_whole(tmp_path: Path, name: str, indent: int | None) -> None:
    (tmp_path / "export.json").write_text(json.dumps(DOCUMENTS[name], indent=indent))
    result = run_import(tmp_path, events=[tmp_path / "export.json"])
    assert result.dataset.events()[["timestamp", "node", "gpu", "code"]].to_numpy().tolist() == [
        [WHEN, "node-0", gpu(0), "79"]
    ]
    account = result.accounting.tables[TABLE]
    assert (account.read, account.used, account.unaccounted) == (json.dumps(DOCUMENTS[name]).count("usb 1") + 1, 1, 0)


OTHER = "NVRM: Xid (PCI:0000:11:00): 48, DBE"


@pytest.mark.parametrize(
    "line",
    [
        wrapped(result={"_time": "2026-03-01T02:20:00Z", "host": "node-0", "_raw": f"[1.1] {XID}\n[1.2] {OTHER}"}),
        wrapped(result={"_raw": f"{LINE}\n{LINE.replace(XID, OTHER)}", "host": "node-0"}),
        wrapped(__REALTIME_TIMESTAMP=str(EPOCH_S * 10**6), _HOSTNAME="node-0", MESSAGE=f"{XID}\n{OTHER}"),
        f"{LINE}#012{OTHER}",
        "".join(f"99 <3>1 2026-03-01T02:20:00Z node-0 kernel - - - {message}" for message in (XID, OTHER)),
    ],
)
def test_each_message_of_a_line_is_an_event(line: str) -> None:
    log = parse_kernel_log([line], timezone=UTC, reference_time=datetime(2026, 3, 2, tzinfo=UTC))
    events = log.events[["timestamp", "node", "code", "pci_bus_id"]].to_numpy().tolist()
    assert events == [[WHEN, "node-0", "79", "00000000:10:00"], [WHEN, "node-0", "48", "00000000:11:00"]]
    assert log.accounting.tables[TABLE].unaccounted == 0


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_a_table_of_events_that_quote_the_kernel_is_no_log(tmp_path: Path, suffix: str) -> None:
    row = {"timestamp": "2026-03-01T02:20:00Z", "node": "node-0", "type": "failure", "code": "c", "message": XID}
    path = tmp_path / f"events.{suffix}"
    path.write_text(json.dumps([row])) if suffix == "json" else pd.DataFrame([row]).to_csv(path, index=False)
    events = run_import(tmp_path, events=[path], mapping="events: {columns: {message: detail}}\n").dataset.events()
    assert events[["type", "code", "detail"]].to_numpy().tolist() == [["failure", "c", XID]]


def test_a_csv_of_tickets_that_quote_the_kernel_is_no_log(tmp_path: Path) -> None:
    rows = [f'2026-03-01T02:20:00Z,node-0,"{XID}"', *("2026-03-01T04:20:00Z,node-0,GPU 0 replaced",) * 2]
    (tmp_path / "tickets.csv").write_text("\n".join(["timestamp,host,message", *rows]) + "\n")
    mapping = "events: {columns: {host: node, message: type}}\n"
    events = run_import(tmp_path, events=[tmp_path / "tickets.csv"], mapping=mapping).dataset.events().fillna("")
    assert sorted(zip(events["type"], events["code"], strict=True)) == [("replacement", ""), ("xid", "79")]


@pytest.mark.parametrize(
    "line",
    [
        f"31 Feb 2026 02:20:00 node-0 kernel: {XID}",
        f"03/01/2026 02:20:00 node-0 kernel: {XID}",  # the order of day and month is not known
        f"Foo  1 02:20:00 node-0 kernel: {XID}",
        f"[99999999999.5] node-0 kernel: {XID}",
        f"25:61:00 {XID}",
    ],
)
def test_a_stamp_that_cannot_be_read_is_counted_with_its_line(line: str) -> None:
    log = parse_kernel_log([line], node="here", timezone=UTC, reference_time=datetime(2026, 3, 2, tzinfo=UTC))
    assert len(log.events) == 0
    assert log.unparsed == [(1, line, "no usable timestamp")]
    assert log.accounting.tables["kernel log lines"].left_out == {"no usable timestamp": 1}


USB = "usb 1-1: new high-speed USB device"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([f"[Mar 1 02:20] {XID}"], "02:20:00"),
        ([f"[Mar 1 02:20] {USB}", f"[  +0.000012] {USB}", f"[ +12.500000] {XID}"], "02:20:12.500"),
        ([f"\x1b[32m[Mar 1 02:20] \x1b[0m{USB}", f"\x1b[32m[  +0.500000] \x1b[0m{XID}"], "02:20:00.500"),
        ([f"kern  :info  : [Mar 1 02:20] {USB}", f"kern  :err   : [  +0.500000] {XID}"], "02:20:00.500"),
        ([f"[Mär 1 02:20] {USB}", "  goes on", f"[ +59.000000] {XID}"], "02:20:59"),
        ([f"[Mar 1 02:19] {USB}", f"[Mar 1 02:20] {USB}", f"[  +3.000000] {XID}"], "02:20:03"),
        # no minute: cut off, of a day that does not exist, or removed by a filter
        ([f"[  +0.000012] {USB}", f"[  +0.000012] {XID}"], None),
        ([f"[Mar77 02:20] {USB}", f"[  +0.000012] {XID}"], None),
        (["[Mar 1 02:20] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54", f"[  +0.000012] {XID}"], None),
        ([f"[Mar 1 02:20] {USB}", "--", f"[  +0.000012] {XID}"], None),
    ],
)  # fmt: skip
def test_deltas_of_dmesg_count_from_the_minute_before(lines: list[str], expected: str | None) -> None:
    log = parse_kernel_log(lines, node="here", timezone=UTC, reference_time=datetime(2026, 3, 2, tzinfo=UTC))
    xids = log.events[log.events["type"] == "xid"]
    instants = [] if expected is None else [pd.Timestamp(f"2026-03-01T{expected}Z")]
    assert xids["timestamp"].tolist() == instants
    assert [number for number, *_ in log.unparsed] == ([len(lines)] if expected is None else [])
    assert log.accounting.tables["kernel log lines"].unaccounted == 0


def test_a_zone_name_that_several_zones_share_is_taken_from_the_mapping() -> None:
    line = f"Sun 2026-03-01 02:20:00 CST node-0 kernel: {XID}"
    (event,) = parse_kernel_log([line], timezone=ZoneInfo("Asia/Shanghai")).events.to_dict("records")
    assert event["timestamp"] == pd.Timestamp("2026-02-28T18:20:00Z")


@pytest.mark.parametrize("form", ["%b %d %H:%M:%S", "%Y-%m-%d %H:%M:%S", "[%a %b %d %H:%M:%S %Y]"])
def test_the_order_of_lines_tells_apart_the_hours_that_a_clock_shows_twice(form: str) -> None:
    berlin = ZoneInfo("Europe/Berlin")
    instants = pd.date_range("2025-10-25T23:50Z", "2025-10-26T02:10Z", freq="20min")
    lines = [f"{instant.tz_convert(berlin):{form}} node-0 kernel: {XID}" for instant in instants]
    log = parse_kernel_log(lines, timezone=berlin, reference_time=datetime(2026, 3, 1, tzinfo=UTC), node="node-0")
    assert log.events["timestamp"].tolist() == instants.tolist()


@pytest.mark.parametrize(
    ("local", "expected", "assumed"),
    [
        (["2025-10-26 02:30:00"], ["2025-10-26T01:30Z"], {TWICE: 1}),
        (["2025-10-26 01:30:00", "2025-10-26 02:30:00"], ["2025-10-25T23:30Z", "2025-10-26T01:30Z"], {TWICE: 1}),
        (["2025-10-26 02:40:00", "2025-10-26 02:30:00"], ["2025-10-26T00:40Z", "2025-10-26T01:30Z"], {}),
        (["2025-10-26 02:30:00", "2025-10-26 02:40:00"], ["2025-10-26T01:30Z", "2025-10-26T01:40Z"], {TWICE: 2}),
        (["2025-03-30 02:30:00"], ["2025-03-30T01:30Z"], {SKIPPED: 1}),
        (["2025-03-30 01:30:00", "2025-03-30 03:30:00"], ["2025-03-30T00:30Z", "2025-03-30T01:30Z"], {}),
    ],
)
def test_a_local_time_at_a_clock_change_that_the_order_does_not_decide_is_counted(local, expected, assumed):
    lines = [f"{stamp} node-0 kernel: {XID}" for stamp in local]
    log = parse_kernel_log(lines, timezone=ZoneInfo("Europe/Berlin"), node="node-0")
    assert log.events["timestamp"].tolist() == [pd.Timestamp(instant) for instant in expected]
    account = log.accounting.tables[TABLE]
    assert (account.assumed, account.used, account.unaccounted) == (assumed, len(lines), 0)
    assert all(f"assumed: {number} {reason}, such as" in as_text(log.accounting) for reason, number in assumed.items())


def test_a_log_without_years_ends_when_it_was_last_written(tmp_path: Path) -> None:
    log = tmp_path / "node-0.log"
    log.write_text(f"Dec 31 23:59:59 node-0 kernel: {XID}\nMar  1 00:20:00 node-0 kernel: {XID}\n")
    written = (DAY + pd.Timedelta("1h")).timestamp()
    os.utime(log, (written, written))
    result = run_import(tmp_path, events=[log], mapping="kernel_log: {timezone: UTC}")
    assert result.dataset.events()["timestamp"].tolist() == [DAY + pd.Timedelta("20min")]
    assert result.quarantined == {"before installation": 1}  # in 2025, as the inventory begins in 2026


def test_the_short_way_of_reading_a_header_finds_what_the_long_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = [
        f"2026-03-01T02:20:00{part} node-{n} kernel: " for n, part in enumerate(("Z", ".5+01:00", ".123456-05:30"))
    ]
    short = [parse_header(prefix) for prefix in prefixes]
    stamps._parse.cache_clear()
    monkeypatch.setattr(stamps, "_RSYSLOG", stamps.re.compile("never"))
    assert [parse_header(prefix) for prefix in prefixes] == short
    stamps._parse.cache_clear()
