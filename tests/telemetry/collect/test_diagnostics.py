import json
import os
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from foundation.errors import InputError
from telemetry.accounting import Accounting
from telemetry.collect import diagnostics as module
from telemetry.collect.diagnostics import GpuNames, gpu_names, read_diagnostics, read_gpu_names
from tests.clock import NOW
from tests.telemetry.collect.builders import staged, staging

collect_diagnostics = partial(module.collect_diagnostics, accounting=Accounting())
DATA = Path(__file__).parents[2] / "data" / "dcgmi"


def verdicts(name: str, **more: object) -> dict[str, tuple[str, str | None]]:
    results = read_diagnostics((DATA / name).read_text(), **more)
    return {verdict.index: (verdict.code, verdict.detail) for verdict in results}


def test_dcgm_3():
    assert verdicts("dcgm3.json") == {
        "0": ("pass", None),
        "1": ("fail", "failed: GPU Memory, Diagnostic"),
        "2": ("inconclusive", "PCIe: warning"),
        "3": ("inconclusive", "PCIe: skipped; Diagnostic: not run"),
    }


def test_dcgm_4():
    results = read_diagnostics((DATA / "dcgm4.json").read_text())
    assert [(verdict.index, verdict.serial, verdict.code, verdict.detail) for verdict in results] == [
        ("0", "1652222000001", "pass", None),
        ("1", "1652222000002", "fail", "failed: memory"),
        ("10", "1652222000011", "inconclusive", "pcie: not run"),
    ]


def test_a_report_of_several_runs_is_refused():
    with pytest.raises(InputError, match="2 runs"):
        read_diagnostics((DATA / "dcgm4.json").read_text() * 2)


def test_a_test_may_be_skipped_where_the_operator_says_so():
    assert verdicts("dcgm4_eud.json")["0"] == ("inconclusive", "eud: skipped")
    assert verdicts("dcgm4_eud.json", may_skip=["EUD"])["0"] == ("pass", None)


def test_an_aborted_run_clears_nothing():
    assert verdicts("dcgm4_aborted.json") == {
        "0": ("inconclusive", "the run was cut short"),
        "1": ("fail", "failed: software"),
    }
    cut = (DATA / "dcgm4.json").read_text()[:900]
    (only,) = read_diagnostics(cut)
    assert (only.index, only.code, only.detail) == ("", "inconclusive", "the report is incomplete")


@pytest.mark.parametrize("report", ["", "Error: Unable to connect", "{}", "[]", '{"DCGM Diagnostic": {}}', '{"a": 1}'])
def test_what_says_nothing_is_inconclusive(report: str):
    (only,) = read_diagnostics(report)
    assert (only.index, only.code) == ("", "inconclusive")


def test_a_failed_test_of_the_node_makes_its_gpus_inconclusive():
    report = {
        "DCGM GPU Diagnostic": {
            "test_categories": [
                {"category": "Deployment", "tests": [{"name": "Denylist", "results": [{"status": "Fail"}]}]},
                {"category": "Hardware", "tests": [{"name": "PCIe", "results": [{"gpu_id": "0", "status": "PASS"}]}]},
            ]
        }
    }
    (only,) = read_diagnostics("Successfully ran\n" + json.dumps(report) + "\ntrailing")
    assert (only.code, only.detail) == ("inconclusive", "Denylist: failed on the node")


def test_details_of_inconclusive_runs_mislead_no_reader():
    from features.labels.facts import diagnostic_outcome

    for path in sorted(DATA.glob("dcgm*")):
        for verdict in read_diagnostics(path.read_text()):
            expected = {"pass": True, "fail": False, "inconclusive": None}[verdict.code]
            assert diagnostic_outcome(verdict.code, verdict.detail or "") is expected, verdict


def names(tmp_path: Path) -> GpuNames:
    path = tmp_path / "gpus.csv"
    path.write_text(
        "index, uuid, serial, pci.bus_id\n0, GPU-a, [N/A], 00000000:10:00.0\n1, GPU-b, 1652222000002, x\n"
        "5, GPU-k, 1652222000011, y\n"
    )
    return read_gpu_names(path)


def test_verdicts_land_on_their_gpus_once(tmp_path: Path):
    where = staging(tmp_path)
    report = tmp_path / "diag.json"
    report.write_text((DATA / "dcgm4.json").read_text())
    os.utime(report, (NOW.timestamp(), NOW.timestamp()))
    delay = timedelta(minutes=10)
    first = collect_diagnostics(report, where, node="n1", names=names(tmp_path), delay=delay)
    assert first == {"pass": 1, "fail": 1, "inconclusive": 1}
    assert collect_diagnostics(report, where, node="n1", names=names(tmp_path), delay=delay) is None
    rows = staged(where)
    assert [(row["gpu"], row["code"], row["type"]) for row in rows] == [
        ("GPU-a", "pass", "diagnostic"),
        ("GPU-b", "fail", "diagnostic"),
        ("GPU-k", "inconclusive", "diagnostic"),
    ]
    assert {(row["node"], row["timestamp"], row["known_at"]) for row in rows} == {("n1", NOW, NOW + delay)}


def test_a_gpu_that_cannot_be_named_is_refused(tmp_path: Path):
    where = staging(tmp_path)
    with pytest.raises(InputError, match=r"unknown GPU: index 0, serial 1652222000001.*nvidia-smi"):
        collect_diagnostics(DATA / "dcgm4.json", where, node="n1", names={}, delay=timedelta(0))
    assert staged(where) == []
    with pytest.raises(InputError, match="the report cannot be read: No such file"):
        collect_diagnostics(tmp_path / "none", where, node="n1", names={}, delay=timedelta(0))


def test_a_table_is_refused_with_the_option_for_json(tmp_path: Path):
    table = tmp_path / "diag.txt"
    table.write_text("| Diagnostic | Result |\n| GPU Memory | Fail - All |\n| Info | {gpu 3} |\n")
    with pytest.raises(InputError, match="dcgmi diag -j"):
        collect_diagnostics(table, staging(tmp_path), node="n1", names={}, delay=timedelta(0))


def test_gpus_of_an_inventory_are_known_by_serial_before_index(tmp_path: Path):
    rows = [
        {"gpu": "GPU-a", "serial": "1652222000001", "slot": "1"},
        {"gpu": "GPU-b", "serial": "1652222000002", "slot": "0"},
        {"gpu": "GPU-k", "serial": None, "slot": "10"},
        {"gpu": None, "slot": "2"},
    ]
    where = staging(tmp_path)
    collect_diagnostics(DATA / "dcgm4.json", where, node="n1", names=gpu_names(rows), delay=timedelta(0))
    assert [row["gpu"] for row in staged(where)] == ["GPU-a", "GPU-b", "GPU-k"]


@pytest.mark.parametrize(
    ("content", "problem"), [("", "cannot be read"), ("index,name\n0,a\n", "no columns index and uuid")]
)
def test_a_wrong_list_of_gpus(tmp_path: Path, content: str, problem: str):
    path = tmp_path / "gpus.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=problem):
        read_gpu_names(path)
