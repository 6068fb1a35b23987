"""Slurm's commands as one small real program: it answers what files beside it hold, and does what slurmctld would."""

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

PROGRAM = """\
#!{python} -SE
import json, os, sys, time
from pathlib import Path

here = Path({folder!r})
name, args = os.path.basename(sys.argv[0]), sys.argv[1:]
with (here / "calls").open("a") as log:
    log.write(json.dumps([name, *args, "E=" + ",".join(sorted(k for k in os.environ if k.startswith("S")))]) + "\\n")
cluster = json.loads((here / "cluster.json").read_text())
fault = cluster.get("fault", {{}}).get(name)
if fault == "slow":
    time.sleep(30)
if fault == "endless":
    while True:
        sys.stdout.write("x" * 65536)
if fault == "fails":
    sys.stderr.write("slurm_load_node error: Unable to contact slurm controller (connect failure)\\n")
    sys.exit(1)
version = cluster["version"]
asked = [a for a in args if a.startswith("--json")]
plugin = cluster["meta"] if "meta" in cluster else {{"data_parser": "data_parser/v0.0.%d" % version}}
if version == 38:
    plugin = {{"type": "openapi/v0.0.38", "name": "Slurm OpenAPI v0.0.38"}}
if asked and "=" in asked[0]:
    if version < 40 or cluster.get("only_own"):
        sys.stderr.write(name + ": option '--json' doesn't allow an argument\\n")
        sys.exit(1)
    plugin = {{"data_parser": "data_parser/" + asked[0].split("=")[1]}}
if name == "scontrol" and asked and version == 38:
    sys.stderr.write("scontrol: unrecognized option '--json'\\n")
    sys.exit(1)

def number(value):
    return value if version == 38 else {{"set": True, "infinite": False, "number": value}}

def shape(node):
    states = node["state"]
    row = {{**node, "reason_changed_at": number(node["reason_changed_at"]), "boot_time": number(node["boot_time"])}}
    if version == 38:
        base = next(s for s in states if s not in ("DRAIN", "FAIL"))
        row["state"], row["state_flags"] = base.lower(), [s for s in states if s != base]
    return row

def report(key, rows):
    text = json.dumps({{"meta": {{"plugin": plugin}}, "errors": cluster.get("errors", []), "warnings": [], key: rows}}
                      if version == 38 else {{key: rows, "last_update": number(1), "meta": {{"plugin": plugin}},
                                              "errors": cluster.get("errors", []), "warnings": []}})
    if fault == "truncated":
        text = text[: len(text) // 2]
    if fault == "garbage":
        text = "<html>502</html>"
    if fault == "noise":
        text = "plugin: loaded\\n" + text
    sys.stdout.write(text)
    sys.exit(0)

if name == "sinfo" or args[:2] == ["show", "node"]:
    rows = [shape(row) for row in cluster["nodes"]]
    if name == "sinfo" and version != 38:
        report("sinfo", [])
    if name == "scontrol" and len(args) > 3:
        rows = [row for row in rows if row["name"] == args[2]]
        if not rows:
            sys.stderr.write("Node %s not found\\n" % args[2])
            sys.exit(1)
    report("nodes", rows)
if name == "sdiag":
    print("sdiag output at Mon Nov 30 14:01:32 2026 (%d)" % cluster.get("time", 0))
    sys.exit(0)
if name == "squeue":
    report("jobs", cluster["jobs"])
if name == "scontrol" and args[0] == "update":
    given = dict(word.split("=", 1) for word in args[1:])
    node = next((n for n in cluster["nodes"] if n["name"] == given["NodeName"]), None)
    if node is None:
        sys.stderr.write("slurm_update error: Invalid node name specified\\n")
        sys.exit(1)
    if cluster.get("denied"):
        sys.stderr.write("slurm_update error: Invalid user id\\n")
        sys.exit(1)
    state = given.get("State")
    if state in ("DRAIN", "FAIL"):
        node["state"] = [*(s for s in node["state"] if s not in ("DRAIN", "FAIL")), state]
    if state == "UNDRAIN":
        node["state"] = [s for s in node["state"] if s not in ("DRAIN", "FAIL")]
        if version < 42:  # 24.11 keeps the reason
            node.update(reason="", reason_changed_at=0, reason_set_by_user="")
    if "Reason" in given:
        node.update(reason=given["Reason"].removeprefix('"').removesuffix('"'), reason_changed_at=1771000000)
        node.update(reason_set_by_user="slurm")
    if "Extra" in given:
        node["extra"] = given["Extra"]
    if "Weight" in given:
        node["weight"] = int(given["Weight"])
    (here / "cluster.json").write_text(json.dumps(cluster))
    sys.exit(0)
if args[:2] == ["show", "partition"]:
    for partition, state in (("g", "UP"), ("old", "INACTIVE")):
        print("PartitionName=%s Nodes=n[0-1] PreemptMode=OFF State=%s TotalCPUs=16" % (partition, state))
    sys.exit(0)
if args[:2] == ["show", "reservation"]:
    if args[2] not in cluster.get("reservations", {{}}):
        sys.stderr.write("Reservation %s not found\\n" % args[2])
        sys.exit(1)
    print("ReservationName=%s StartTime=2026-01-01T00:00:00 Nodes=%s NodeCnt=1 Flags=SPEC_NODES State=%s" % (
        args[2], cluster["reservations"][args[2]], "INACTIVE" if args[2] == "over" else "ACTIVE"))
    sys.exit(0)

def names(row):
    ids = [str(row["job_id"])]
    for key, mark, index in (("array_job_id", "_", "array_task_id"), ("het_job_id", "+", "het_job_offset")):
        leader, place = row[key]["number"], row[index]
        ids += [str(leader), "%s%s%s" % (leader, mark, place["number"])] if leader and place["set"] else []
    return ids

if not any(args[-1] in names(row) for row in cluster["jobs"]):
    sys.stderr.write("Invalid job id specified for job %s\\n" % args[-1])
    sys.exit(1)
"""


class FakeSlurm:
    """A folder of programs, and what they tell."""

    def __init__(self, folder: Path, version: int = 42, nodes: int = 2) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        program = folder / "scontrol"
        program.write_text(PROGRAM.format(python=sys.executable, folder=str(folder)))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        for name in ("sinfo", "squeue", "scancel", "sdiag"):
            os.link(program, folder / name)
        self.tell(version=version, nodes=[node_row(i, 0, 1770000000) for i in range(nodes)], jobs=[])

    def tell(self, **changed: Any) -> None:
        file = self.folder / "cluster.json"
        stored = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**stored, **changed}))

    @property
    def cluster(self) -> dict[str, Any]:
        return json.loads((self.folder / "cluster.json").read_text())

    @property
    def calls(self) -> list[list[str]]:
        file = self.folder / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def node_row(i: int, changed_at: object, boot_time: object) -> dict[str, Any]:
    """A node that nobody wrote to."""
    return {
        "name": f"n{i}", "state": ["IDLE"], "reason": "", "reason_changed_at": changed_at, "reason_set_by_user": "",
        "extra": "", "weight": 1, "boot_time": boot_time, "gres": "gpu:h100:8", "features": [], "partitions": ["g"],
    }  # fmt: skip


def job_row(number: int, nodes: str, state: str = "RUNNING", **other: Any) -> dict[str, Any]:
    """A job as later versions tell it."""
    return {
        "job_id": number, "job_state": [state], "nodes": nodes, "user_name": "ann", "requeue": True, "batch_flag": True,
        "restart_cnt": 0, "submit_time": number_of(1771000000), "start_time": number_of(1771000100),
        "end_time": number_of(1771086500), "time_limit": number_of(1440), "comment": "", "extra": "",
        "array_job_id": number_of(0), "array_task_id": {"set": False, "infinite": False, "number": 0},
        "het_job_id": number_of(0), "het_job_offset": number_of(0), "gres_detail": [], "tres_alloc_str": "gres/gpu=16",
        **other,
    }  # fmt: skip


def number_of(value: int) -> dict[str, Any]:
    return {"set": True, "infinite": False, "number": value}
