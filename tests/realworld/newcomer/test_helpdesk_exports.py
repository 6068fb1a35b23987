"""Exports of helpdesks, as files and from their APIs, imported by the mapping that is suggested for them."""

import json
from pathlib import Path

import pandas as pd
import pytest

from telemetry.dataset.channels import CATALOGUE
from telemetry.importing.mapping import load_mapping
from telemetry.importing.suggestion.questions import Inquiry, find_questions
from telemetry.importing.tickets import SEVERAL_IN_TEXT
from tests.telemetry.helpers import gpu, run_import, samples_frame

CSV = {
    "helpdesk": "Ticket,Opened,Resolved,Host,Slot,Summary\n"
    "HD-1,2026-03-01 00:10,2026-03-01 02:00,node-0,1,GPU fell off the bus\n",
    "order of day and month, and zone": "Number,Opened,Resolved,Host,GPU slot,Short description,Priority\n"
    "INC1,01/03/2026 00:10,01/03/2026 02:00,node-0,1,GPU 1 fell off the bus,2\n",
    "servicenow": '"Number","Opened","Updated","Resolved","Closed","Due date",'
    '"Configuration item","u_slot","Short description"\n'
    '"INC1","2026-03-01 00:10:00","2026-03-09 00:00:00","2026-03-01 02:00:00","2026-03-08 02:00:00","2026-03-02",'
    '"node-0.cluster.local","1","GPU fell off the bus"\n',
    "jira": "Summary,Issue key,Issue Type,Created,Updated,Resolved,Labels,Labels,Custom field (Node),"
    "Custom field (GPU index)\n"
    '"GPU fell off the bus",OPS-1,Bug,01/Mar/26 12:10 AM,02/Mar/26 1:00 AM,01/Mar/26 2:00 AM,gpu,ecc,node-0,1\n',
    "zendesk": "Id,Subject,Requested,Created at,Updated at,Solved at,Group,Host [txt],Slot [int]\n"
    "35,GPU broken,2026-03-01,2026-03-01 00:10,2026-03-03 03:00,2026-03-01 02:00,HPC,node-0,1\n",
    "glpi": '"ID";"Title";"Opening date";"Time to resolve";"Solution date";"Associated element";"Position"\n'
    '"12";"GPU dead";"2026-03-01 00:10";"2026-03-05 00:00";"2026-03-01 02:00";"node-0";"1"\n',
    "rt": "id\tQueue\tSubject\tCreated\tResolved\tCF.{Hostname}\tCF.{Slot}\n"
    "1\tgpu\tGPU lost\tSun Mar 01 00:10:00 2026\tSun Mar 01 02:00:00 2026\tnode-0\t1\n",
    "types that say nothing": "Ticket ID,Subject,Type,Created time,Resolved time,Closed time,Host,Slot\n"
    "9,GPU throws ECC errors,Incident,2026-03-01 00:10,2026-03-01 02:00,2026-03-04 02:00,node-0,1\n",
    "when work started": "id,Subject,Created,Started,Resolved,Host,Slot\n"
    "1,GPU lost,2026-03-01 00:10,2026-03-01 01:00,2026-03-01 02:00,node-0,1\n",
    "zone in the names": "Title,Description,Created At (UTC),Closed At (UTC),Asset(s),Slot\n"
    "GPU lost,see below,2026-03-01 00:10,2026-03-01 02:00,node-0,1\n",
    "remedy": "Incident ID*+,Summary*,Reported Date+,Last Resolved Date,CI+,Slot\n"
    "INC1,GPU failed,3/1/2026 12:10:00 AM,3/1/2026 2:00:00 AM,node-0,1\n"
    "INC2,GPU failed,3/13/2026 12:10:00 AM,3/13/2026 2:00:00 AM,node-9,1\n",
    # https://docs.opsgenie.com, views of Zendesk, CMDBs and spreadsheets
    "entity, GPU in the text": "TinyId,Alias,Message,Priority,CreatedAt,UpdatedAt,Entity,Closed at\n"
    "1,a,GPU 1 lost,P1,2026-03-01T00:10:00Z,2026-03-02T02:00:00Z,node-0,2026-03-01T02:00:00Z\n",
    "a title above the header": "GPU tickets of March\n\nOpened;Resolved;Host;Slot;Summary\n"
    "2026-03-01 00:10;2026-03-01 02:00;node-0;1;GPU lost\n",
    "Spanish": "Número;Abierto;Resuelto;Servidor;Ranura;Descripción\n"
    "1;01/03/2026 00:10;01/03/2026 02:00;node-0;1;GPU averiada\n2;13/03/2026 02:00;;node-9;1;GPU averiada\n",
    "a line end in the header": '"Date\nopened",Resolved,Host,Slot,Summary\n'
    "2026-03-01 00:10,2026-03-01 02:00,node-0,1,GPU lost\n",
    "Chinese, address and name of the host": "创建时间,解决时间,主机,主机名,槽位,标题\n"
    "2026-03-01 00:10,2026-03-01 02:00,10.0.0.1,node-0,1,GPU 掉卡\n",
    "empty notes": "Task ID,Opened,Date fixed,Issue,Notes,Devices,Slot\n"
    "1,2026-03-01 00:10,2026-03-01 02:00,GPU dead,,node-0,1\n",
    "date and time in columns of their own": "Date,Time,Host,Slot,Problem,Resolved\n"
    "2026-03-01,00:10,node-0,1,GPU fell off the bus,2026-03-01 02:00\n",
    "glpi in German": "ID;Titel;Letzte Änderung;Eröffnungsdatum;Lösungsdatum;Zugehörige Elemente\n"
    "12;GPU 1 defekt;03-03-2026 00:10;01-03-2026 00:10;01-03-2026 02:00;node-0\n"
    "13;Papierstau;23-03-2026 00:10;21-03-2026 00:10;21-03-2026 02:00;node-9\n",
    "servicenow in French": "Numéro,Ouvert,Résolu,Élément de configuration,Description brève,Notes de clôture\n"
    "INC1,2026-03-01 00:10,2026-03-01 02:00,node-0,GPU 1 en panne,carte réinsérée\n",
    "Chinese, another date": "时间,主机,故障描述,恢复时间,更新时间\n"
    "2026年3月1日 00:10,node-0,GPU 1 掉卡,2026年3月1日 02:00,2026年3月5日 02:00\n",
    "HTML": "Created,Host,Description,Resolved\n"
    '2026-03-01 00:10,node-0,"<p>GPU&nbsp;1 <b>fell off</b></p><br/>the bus",2026-03-01 02:00\n',
    "HTML, escaped": "Created,Host,Description,Resolved\n"
    "2026-03-01 00:10,node-0,&lt;div&gt;GPU&amp;nbsp;1&lt;/div&gt; is lost,2026-03-01 02:00\n",
    # The title names the node.
    "GitHub": "number\ttitle\tstate\tcreatedAt\tclosedAt\tlabels\n"
    "12\tnode-0: GPU 1 fell off the bus\tCLOSED\t2026-03-01T00:10:00Z\t2026-03-01T02:00:00Z\tgpu\n",
    "PagerDuty": "id,incident_number,description,service_id,service_name,created_on,resolved_on,auto_resolved,urgency\n"
    "Q1,12,[FIRING:1] GPU 1 lost (node-0),P1,gpu,2026-03-01T00:10:00+00:00,2026-03-01T02:00:00+00:00,f,high\n",
    "history of alerts": "Starts,Ends,Alert,Instance,GPU,Severity\n"
    "2026-03-01T00:10Z,2026-03-01T02:00Z,GPUFellOffBus,node-0:9400,1,critical\n",
    "what was done": "Date,Node,GPU,Failure description,Action Taken,Date Fixed\n"
    "2026-03-01 00:10,node-0,1,NVLink errors,Reseated,2026-03-01 02:00\n",
    "what nvidia-smi -L prints": "Summary,Created,Resolved,Host\n"
    f"GPU 1: NVIDIA H100 (UUID: {gpu(1)}) lost,2026-03-01 00:10,2026-03-01 02:00,node-0\n",
    "twelve hours, month first": "Date Opened,Host Name,GPU #,Problem,Date Closed\n"
    "3/1/2026 12:10 AM,node-0,1,GPU fell off bus,3/1/2026 2:00 AM\n3/13/2026 12:10 AM,node-9,0,paper jam,N/A\n",
}
FIELDS = {
    "summary": "GPU lost",
    "created": "2026-03-01T00:10:00.000+0000",
    "resolutiondate": "2026-03-01T02:00:00.000+0000",
}
RECORD = {
    "opened_at": "2026-03-01 00:10:00",
    "resolved_at": "2026-03-01 02:00:00",
    "sys_updated_on": "2026-03-05 02:00:00",
    "cmdb_ci": {"display_value": "node-0", "link": "https://desk/1"},
    "u_slot": "1",
    "short_description": "GPU lost",
}
APIS = {
    # https://prometheus.io/docs/alerting/latest/clients/
    "alerts": [
        {
            "labels": {"alertname": "GPULost", "instance": "node-0", "gpu": "1"},
            "annotations": {"summary": "GPU fell off the bus"},
            "startsAt": "2026-03-01T00:10:00.000Z",
            "endsAt": "2026-03-01T02:00:00Z",
            "status": {"state": "suppressed"},
        }
    ],
    "records": {"records": [RECORD]},
    "hits of a search": {"took": 3, "hits": {"total": {"value": 1}, "hits": [{"_id": "1", "_source": RECORD}]}},
    "members": {
        "@odata.id": "/redfish/v1/Systems/1/LogServices/SEL/Entries",
        "Members": [
            {"Created": "2026-03-01T00:10:00Z", "Message": "GPU lost", "Resolved": False, "node": "node-0", "slot": 1},
            {"Created": "2026-03-01T02:00:00Z", "Message": "GPU repaired", "node": "node-0", "slot": 1},
        ],
    },
    "issues": {
        "expand": "names",
        "total": 1,
        "issues": [{"key": "OPS-1", "fields": {**FIELDS, "node": "node-0", "slot": 1}}],
    },
}


def imported(folder: Path, name: str, text: str, mapping: str | None = None) -> pd.DataFrame:
    path = folder / name
    path.write_text(text)
    if mapping is None:
        given = {"events": [path]}
        mapping = Inquiry(given, None, *find_questions(given, load_mapping(None), CATALOGUE)).mapping_text()
    result = run_import(folder, samples=samples_frame(), events=[path], mapping=mapping, max_loss=1.0)
    assert result.accounting.tables["events"].read, "nothing was read"
    events = result.dataset.events()
    events["clock"] = events["timestamp"].dt.strftime("%d %H:%M")
    events.attrs["counts"] = result.counts
    return events.assign(gpu=events["gpu"].astype(object).where(events["gpu"].notna(), None))


@pytest.mark.parametrize("text", CSV.values(), ids=CSV)
def test_a_resolved_ticket_is_a_failure_and_its_repair(tmp_path: Path, text: str) -> None:
    events = imported(tmp_path, "tickets.csv", text)
    expected = [["01 00:10", "node-0", gpu(1), "failure"], ["01 02:00", "node-0", gpu(1), "repair"]]
    assert events[["clock", "node", "gpu", "type"]].to_numpy().tolist() == expected


@pytest.mark.parametrize(("title", "asked"), [("Title,Status", 1), ("Title,Host", 0), ("Title,UUID", 0)])
def test_a_title_that_names_the_node_is_the_only_question(tmp_path: Path, title: str, asked: int) -> None:
    (tmp_path / "t.csv").write_text(f"Created,{title},Closed\n2026-03-01T00:10Z,node-0: XID 79,x,2026-03-01T00:20Z\n")
    _, questions = find_questions({"events": [tmp_path / "t.csv"]}, load_mapping(None), CATALOGUE)
    assert [q.answer for q in questions] == [{"events": {"columns": {"Title": ["type", "node"]}}}] * asked


def test_a_guess_that_is_not_sure_answers_no_question(tmp_path: Path) -> None:
    (tmp_path / "pagerduty.csv").write_text("description,service_id,created_on\nXID 79,7,2026-03-01T00:10:00Z\n")
    _, questions = find_questions({"events": [tmp_path / "pagerduty.csv"]}, load_mapping(None), CATALOGUE)
    assert [question.missing for question in questions] == ["node or gpu or serial"]


@pytest.mark.parametrize(
    ("header", "row", "expected"),
    [
        ("Replaced on", "2026-03-01 02:00", [("01 02:00", "replacement")]),
        ("Replacement date", "1 Mar 2026 02:00", [("01 02:00", "replacement")]),
        ("RMA shipped", "2026-03-01", [("01 23:59", "replacement")]),
        ("Ausgetauscht am", "01.03.2026 02:00", [("01 02:00", "replacement")]),
        ("Resolved,Close notes", "2026-03-01 02:00,Replaced GPU 1 under RMA", [("01 02:00", "replacement")]),
        ("Ship date,Replace date", "2026-03-03,2026-03-01 02:00", [("01 02:00", "replacement")]),
        ("Resolved,Date replaced", "2026-03-01 05:00,2026-03-01 02:00", [("01 02:00", "replacement")]),
        ("Resolved,GPU replaced", "2026-03-01 05:00,", [("01 05:00", "repair")]),
        ("Replaced on", "", []),
        ("Swapped", "N/A", []),
        ("Repaired on", "2026-03-01 02:00", [("01 02:00", "repair")]),
    ],
)
def test_a_date_of_replacement_replaces_the_gpu(tmp_path, header, row, expected):
    never = "," * header.count(",")  # a second ticket is open
    text = (
        f"Opened,Host,Slot,Summary,{header}\n2026-03-01 00:10,node-0,1,GPU fell off the bus,{row}\n"
        f"2026-03-01 00:20,node-1,0,GPU lost,{never}\n"
    )
    events = imported(tmp_path, "t.csv", text)
    assert events["type"].tolist().count("failure") == 2
    work = events[events["type"] != "failure"]
    assert [*zip(work["clock"], work["type"], strict=True)] == expected
    assert work["gpu"].tolist() == [gpu(1)] * len(expected)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("content", APIS.values(), ids=APIS)
def test_what_an_api_returns_is_read_as_its_rows(tmp_path, content, indent):
    events = imported(tmp_path, "tickets.json", json.dumps(content, indent=indent))
    expected = [["01 00:10", "node-0", gpu(1), "failure"], ["01 02:00", "node-0", gpu(1), "repair"]]
    assert events[["clock", "node", "gpu", "type"]].to_numpy().tolist() == expected


def test_lines_with_lists_of_their_own_installation_rows(tmp_path: Path) -> None:
    row = {"timestamp": "2026-03-01T01:00:00Z", "node": "node-0", "type": "failure", "items": [{"a": 1}]}
    mapping = "events: {ignore_others: true}\n"
    text = json.dumps(row) + "\n" + json.dumps(row | {"node": "node-1"}) + "\n"
    assert imported(tmp_path, "tickets.jsonl", text, mapping)["node"].tolist() == ["node-0", "node-1"]


MAPPING = "timezone: UTC\nevents: {columns: {Title: [type, node], Opened: timestamp}}\n"


TITLES = [
    ("node-0: GPU is lost", "node-0", None, "failure"),
    (f"NODE-1.cluster.local {gpu(3)} fell off the bus", "node-1", 3, "failure"),
    ("XID 79 on node-0, GPU 00000000:11:00.0", "node-0", 1, "xid"),
    ("node-0 GPU 0000:11:00 and GPU 0000:10:00 lost", "node-0", "several", "failure"),
    ("node-1: GPU failed at 00:10:00", "node-1", None, "failure"),
    ("GPU 1 on node-0 fell off the bus", "node-0", 1, "failure"),
    ("node-1: gpu #01: XID 79", "node-1", 3, "xid"),
    ("node-0: GPU index 1 (0000:11:00.0) lost", "node-0", 1, "failure"),
    (f"node-1: GPU 1 lost, serial of {gpu(2)}", "node-1", "several", "failure"),
    ("host=node-1 gpu=1 lost", "node-1", 3, "failure"),
    ("node-0: srun --gpus=1, GPU lost", "node-0", None, "failure"),
    ("node-0: GPU lost, gres/gpu=1", "node-0", None, "failure"),
    ("node-0: GPU lost, utilization.gpu=1", "node-0", None, "failure"),
    ("node-0: GPUs 0-1 lost", "node-0", "several", "failure"),
    ("node-0: GPU 0 and GPU 1 lost", "node-0", "several", "failure"),
    ("node-0: GPU 7 lost", "node-0", None, "failure"),
    ("node-0: GPU 1 of 2 lost", "node-0", None, "failure"),
    ("node-0: GPU 1 GiB, 0.5 V: lost", "node-0", None, "failure"),
    ("node-0 drained for GPU 1", "node-0", None, "drain"),
    ("node-0 and node-1: GPUs lost", None, None, None),
    ("GPU lost on 0", None, None, None),
]
"""A title, and what it names: the node or none, the number of the GPU, the type of event."""


def test_a_title_may_name_the_node_and_the_gpu(tmp_path: Path) -> None:
    text = "".join(f'2026-03-01 {hour:02}:00,"{title}"\n' for hour, (title, *_) in enumerate(TITLES, 1))
    events = imported(tmp_path, "t.csv", f"Opened,Title\n{text}", MAPPING)
    expected = [
        (f"01 {hour:02}:00", node, gpu(number) if isinstance(number, int) else None, kind)
        for hour, (_, node, number, kind) in enumerate(TITLES, 1)
        if node is not None
    ]
    read = events.sort_values("clock")[["clock", "node", "gpu", "type"]]
    assert list(read.itertuples(index=False, name=None)) == expected
    assert events.attrs["counts"][SEVERAL_IN_TEXT] == [number for _, _, number, _ in TITLES].count("several")


HOSTS = [
    *(("node-[0-1]", [0, 1]), ("node-0,node-1", [0, 1]), ("node-1; node-0", [0, 1]), ("node-0 and node-1", [0, 1])),
    *(("node-0 / NODE-1", [0, 1]), ("node-0\nnode-1", [0, 1]), ("node-[0-0]", [0])),
    *(("node-[0-9]", []), ("node-0,other", []), ("node-[1", [])),
]


def test_a_ticket_of_several_hosts_is_an_event_of_each(tmp_path: Path) -> None:
    text = "Opened,Host,Summary,Resolved\n" + "".join(
        f'2026-03-01 {hour:02}:00,"{hosts}",GPU lost,2026-03-01 {hour:02}:30\n' for hour, (hosts, _) in enumerate(HOSTS)
    )
    events = imported(tmp_path, "t.csv", text)
    expected = [
        (f"01 {hour:02}:{minute}", f"node-{number}", kind)
        for hour, (_, nodes) in enumerate(HOSTS)
        for minute, kind in (("00", "failure"), ("30", "repair"))
        for number in nodes
    ]
    assert list(events[["clock", "node", "type"]].itertuples(index=False, name=None)) == expected


def test_a_ticket_without_an_end_is_open_however_that_is_written(tmp_path: Path) -> None:
    never = ["", "-", "N/A", "Unknown", "never", "None", "Pending", "[N/A]", "0000-00-00 00:00:00"]
    never.append("0001-01-01T00:00:00Z")
    text = "Opened,Host,Summary,Resolved\n" + "".join(
        f"2026-03-01 {hour:02}:00,node-0,GPU lost,{end}\n" for hour, end in enumerate(["2026-03-01 00:30", *never])
    )
    assert imported(tmp_path, "t.csv", text)["type"].tolist() == ["failure", "repair", *["failure"] * len(never)]


def test_words_that_a_mapping_gives_a_type_still_name_the_gpu_and_the_xid(tmp_path: Path) -> None:
    text = (
        "When,Server,Action\n2026-03-01 01:00,node-0,XID 79 on GPU 1\n2026-03-01 02:00,node-0,GPU 1 replaced\n"
        "2026-03-01 03:00,node-0,board of GPU 0 changed\n"
    )
    kinds = "{XID 79 on GPU 1: xid, GPU 1 replaced: replacement, board of GPU 0 changed: repair}"
    columns = "columns: {When: timestamp, Server: node, Action: type}"
    events = imported(tmp_path, "t.csv", text, f"timezone: UTC\nevents: {{{columns}, values: {{type: {kinds}}}}}\n")
    assert events[["gpu", "type", "code", "detail"]].fillna("").to_numpy().tolist() == [
        [gpu(1), "xid", "79", "XID 79 on GPU 1"],
        [gpu(1), "replacement", "", "GPU 1 replaced"],
        [gpu(0), "repair", "", "board of GPU 0 changed"],
    ]


@pytest.mark.parametrize("text", ["description", None])
def test_the_codes_of_a_column_of_xids_are_xids_whatever_the_text_says(tmp_path: Path, text: str | None) -> None:
    rows = ["79,fallen off the bus", '"48, 63",DBE', "13.0,app", "0,GPU lost", "94,replaced GPU 1"]
    rows = [f"2026-03-01T0{hour}:00Z,node-0,1,{row}" for hour, row in enumerate(rows)]
    rows = [row if text else row.rpartition(",")[0] for row in rows]
    header = "time,host,gpu_index,xid" + (f",{text}" if text else "")
    events = imported(tmp_path, "xids.csv", "\n".join([header, *rows]) + "\n")
    assert set(events["gpu"]) == {gpu(1)}
    xids = [("xid", code) for code in ("79", "48", "63", "13")]
    last = [("failure", "0"), ("replacement", "94")] if text else [("xid", "94")]
    assert list(zip(events["type"], events["code"], strict=True)) == [*xids, *last]


def test_an_event_that_is_given_as_no_fault_is_none_whatever_its_xid(tmp_path: Path) -> None:
    text = f"timestamp,gpu,type,xid\n2026-03-01T00:10Z,{gpu(1)},other,13\n2026-03-01T00:20Z,{gpu(1)},failure,79\n"
    assert imported(tmp_path, "t.csv", text)["type"].tolist() == ["other", "xid"]


def test_a_list_of_repairs_with_its_own_words_keeps_them(tmp_path: Path) -> None:
    text = (
        "date,opened,closed,node,category,comment\n"
        "2026-03-01T00:10Z,2026-03-01T00:20Z,2026-03-01T02:00Z,node-0,failure,board was swapped\n"
    )
    events = imported(tmp_path, "t.csv", text)
    assert events[["clock", "type"]].to_numpy().tolist() == [["01 00:10", "failure"], ["01 02:00", "replacement"]]
    assert events["known_at"].dt.strftime("%H:%M").iloc[0] == "00:20"
