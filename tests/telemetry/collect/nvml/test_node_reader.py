"""A node goes on being read, and its XIDs heard, while one of its GPUs, or its driver, does not answer."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from multiprocessing import Pipe
from pathlib import Path

import pytest

from foundation.errors import InputError
from telemetry.collect.nvml.library import Identity, NvmlFault
from telemetry.collect.nvml.node_reader import GPU_DEADLINE_S, MAX_STUCK, ROOT, NodeReader, Row
from tests.telemetry.collect.nvml.memory_nvml import MemoryGpu, MemoryNode


def gpus(rows: list[Row]) -> list[str]:
    return [row.identity.gpu for row in rows]


def heard(reader: NodeReader) -> list[tuple[str | None, str | None]]:
    """Code and GPU of the events since the last call."""
    events, reader.events = reader.events, []
    return [(event.code, event.gpu) for event in events]


def read(node: MemoryNode) -> NodeReader:
    reader = node.reader()
    reader.read_gpus()
    return reader


def test_each_turn_has_a_row_of_each_gpu_with_how_the_reading_went() -> None:
    node = MemoryNode(3)
    reader = node.reader()
    for _ in range(2):
        turn = reader.read_gpus()
        assert gpus(turn) == ["GPU-0", "GPU-1", "GPU-2"]
        assert turn[0].values == {
            "gpu_temp_c": 40.0,
            "power_w": 250.0,
            "energy_mj": 5000.0,
            "recovery_action": 0.0,
            "scrape_duration_s": 0.0,
            "scrape_failures_total": 0.0,
            "channels_reported": 4.0,
        }
    assert len(node.children) == 1
    assert reader.driver == "580.95.05"


@pytest.mark.parametrize("code", [15, 28])
def test_a_lost_gpu_is_reported_once_until_it_was_back(code: int) -> None:
    node = MemoryNode()
    reader = read(node)
    node.nvml.gpus[0].lost = code
    turn = reader.read_gpus()
    assert (gpus(turn), heard(reader)) == (["GPU-1"], [("gpu_lost", "GPU-0")])
    reader.read_gpus()
    assert heard(reader) == []
    assert [identity.gpu for identity in reader.present] == ["GPU-1"]
    node.nvml.gpus[0].lost = None
    turn = reader.read_gpus()
    assert gpus(turn) == ["GPU-0", "GPU-1"]
    assert turn[0].values["scrape_failures_total"] == 2.0
    node.nvml.gpus[0].lost = code
    reader.read_gpus()
    assert heard(reader) == [("gpu_lost", "GPU-0")]


def test_a_gpu_that_is_lost_from_the_start_is_reported_by_what_is_known_of_it() -> None:
    node = MemoryNode()
    node.nvml.gpus[0].lost = 15
    known = {0: Identity(0, "GPU-0")}
    for options, expected in (
        ({}, [("gpu_lost", None)]),
        ({"known": known}, [("gpu_lost", "GPU-0")]),
        ({"known": known, "open_faults": {"GPU-0": "gpu_lost"}}, []),
    ):
        reader = node.reader(**options)
        assert (gpus(reader.read_gpus()), heard(reader)) == (["GPU-1"], expected)


def test_a_gpu_that_the_driver_no_longer_lists_is_lost() -> None:
    node = MemoryNode()
    reader = read(node)
    node.nvml.broken = 1
    reader.read_gpus()
    node.nvml.broken = None
    del node.nvml.gpus[0]
    node.clock.sleep(2)
    assert gpus(reader.read_gpus()) == ["GPU-1"]
    assert "no longer listed" in str(reader.events[0].detail)
    assert heard(reader) == [("gpu_lost", "GPU-0")]


def test_a_gpu_that_hangs_costs_one_deadline_and_is_tried_again_with_growing_pauses() -> None:
    node = MemoryNode(3)
    reader = read(node)
    node.hang = {1}
    turn = reader.read_gpus()
    assert (gpus(turn), heard(reader)) == (["GPU-0", "GPU-2"], [("nvml_hang", "GPU-1")])
    assert node.clock.seconds == GPU_DEADLINE_S
    assert node.children[0].ended
    tries = 0
    for _ in range(240):
        children = len(node.children)
        turn = reader.read_gpus()
        assert (gpus(turn), heard(reader)) == (["GPU-0", "GPU-2"], [])
        tries += len(node.children) > children
        node.clock.sleep(30)
    assert 3 <= tries <= 10
    node.hang = set()
    node.clock.sleep(4500)
    assert sorted(gpus(reader.read_gpus())) == ["GPU-0", "GPU-1", "GPU-2"]
    node.hang = {1}
    reader.read_gpus()
    assert heard(reader) == [("nvml_hang", "GPU-1")]


def test_no_further_process_is_risked_while_many_hang_in_the_kernel() -> None:
    node = MemoryNode()
    reader = read(node)
    node.hang, node.stuck = {0}, True
    for _ in range(10):
        assert gpus(reader.read_gpus()) == ["GPU-1"]
        node.clock.sleep(7200)
    assert sum(child.ended for child in node.children) == MAX_STUCK


def test_a_driver_that_hangs_while_it_is_opened_is_reported_once_and_tried_again() -> None:
    node = MemoryNode()
    node.hang = {None}
    reader = node.reader()
    turn = reader.read_gpus()
    assert (gpus(turn), heard(reader)) == ([], [("nvml_hang", None)])
    node.clock.sleep(2)
    reader.read_gpus()
    assert heard(reader) == []
    node.hang = set()
    node.clock.sleep(60)
    assert gpus(reader.read_gpus()) == ["GPU-0", "GPU-1"]


def test_a_gpu_over_which_the_library_crashes_is_left_alone_for_a_while() -> None:
    node = MemoryNode()
    reader = read(node)
    node.crash = {0}
    turn = reader.read_gpus()
    assert (gpus(turn), heard(reader)) == (["GPU-1"], [])
    node.crash = set()
    node.clock.sleep(80)
    assert sorted(gpus(reader.read_gpus())) == ["GPU-0", "GPU-1"]


@pytest.mark.parametrize("code", [1, 9, 18])
def test_a_driver_that_goes_away_is_opened_again_with_pauses(code: int) -> None:
    node = MemoryNode()
    reader = read(node)
    node.nvml.broken = code
    assert gpus(reader.read_gpus()) == []
    opened = len(node.children)
    for _ in range(300):
        node.clock.sleep(1)
        assert reader.read_gpus() == []
    assert 5 <= len(node.children) - opened <= 20
    node.nvml.broken, node.nvml.version = None, "590.10"
    node.clock.sleep(80)
    assert gpus(reader.read_gpus()) == ["GPU-0", "GPU-1"]
    assert reader.driver == "590.10"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (12, "there is no NVIDIA driver: its library libnvidia-ml.so.1 was not found"),
        (9, "the NVIDIA driver is not loaded"),
    ],
)
def test_a_node_that_never_had_a_driver_is_an_error_of_the_user(code: int, problem: str) -> None:
    node = MemoryNode()
    node.nvml.broken = code
    with pytest.raises(InputError) as caught:
        node.reader().read_gpus()
    assert caught.value.problem == problem
    assert "`predrain collect exporters`" in caught.value.advice


def test_a_gpu_that_only_fails_is_counted_and_stops_no_other() -> None:
    node = MemoryNode()
    node.nvml.gpus[0].lost = 16
    reader = node.reader()
    turn = reader.read_gpus()
    assert (gpus(turn), heard(reader), dict(reader.accounting.tables["GPU readings"].left_out)) == (
        ["GPU-1"],
        [],
        {"reset_required": 1},
    )


def test_an_xid_is_of_its_gpu_and_of_the_moment_of_the_wait_s_return() -> None:
    node = MemoryNode()
    reader = read(node)
    node.nvml.events = [(node.nvml.gpus[1], 79, None), (node.nvml.gpus[0], 31, 3), (MemoryGpu("GPU-9"), 79, None)]
    for number in range(3):
        reader.listen(5)
        assert len(reader.events) == number + 1
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert [(event.timestamp, event.gpu, event.code, event.detail) for event in reader.events] == [
        (epoch, "GPU-1", "79", None),
        (epoch, "GPU-0", "31", "GPU instance 3"),
        (epoch, None, "79", None),
    ]


@pytest.mark.parametrize("trouble", ["lost", "without events", "hang", "refused"])
def test_one_gpu_s_trouble_does_not_make_the_others_deaf(trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    node = MemoryNode()
    reader = read(node)
    faults: list[NvmlFault] = []
    if trouble == "lost":
        reader.listen(5)
        node.nvml.gpus[0].lost, faults = 15, [NvmlFault(15)]
    elif trouble == "without events":
        node.nvml.gpus[0].watchable = False
    elif trouble == "hang":
        node.hang = {0}
        reader.read_gpus()
    else:
        faults = [NvmlFault(999)]
    node.nvml.events = [*faults, (node.nvml.gpus[1], 63, None)]
    heard(reader)
    reader.listen(30)
    assert heard(reader) == [("63", "GPU-1")]
    assert caplog.text.count("XID events stopped") == (trouble == "refused")
    watched = [record.message for record in caplog.records if "listening" in record.message]
    assert watched[-1] == f"listening for XIDs of {2 if trouble == 'refused' else 1} GPUs"


@pytest.mark.parametrize("trouble", ["crash", "hang"])
def test_a_child_that_breaks_while_it_only_listens_is_replaced(trouble: str) -> None:
    node = MemoryNode()
    reader = read(node)
    getattr(node, trouble).add(-1)  # at no GPU
    for _ in range(40):
        reader.listen(1)
    getattr(node, trouble).clear()
    assert node.children[0].ended
    assert gpus(reader.read_gpus()) == ["GPU-0", "GPU-1"]
    node.nvml.events = [(node.nvml.gpus[0], 31, None)]
    reader.listen(5)
    assert heard(reader)[-1:] == [("31", "GPU-0")]


def test_the_child_finds_the_program_where_that_is_not_installed(tmp_path: Path) -> None:
    connection, other_end = Pipe()
    child = subprocess.Popen(
        [sys.executable, "-S", "-P", "-m", "telemetry.collect.nvml.child", str(other_end.fileno())],
        stderr=subprocess.PIPE, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        pass_fds=[other_end.fileno()],
    )  # fmt: skip
    other_end.close()
    connection.close()
    assert (child.communicate(timeout=30)[1], child.returncode) == (b"", 0)
