"""A node goes on being read while one of its GPUs, or its driver, does not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from telemetry.collect.nvml.child import ROOT
from telemetry.collect.nvml.library import Identity, NvmlFault
from telemetry.collect.nvml.node_reader import GPU_DEADLINE_S, MAX_STUCK, NodeReader, Turn
from telemetry.errors import InputError
from tests.telemetry.collect.nvml.helpers import MemoryNode


def gpus(turn: Turn) -> list[str]:
    return [row.identity.gpu for row in turn.rows]


def told(turn: Turn) -> list[tuple[str, str | None]]:
    return [(trouble.code, trouble.identity and trouble.identity.gpu) for trouble in turn.troubles]


def test_each_turn_has_a_row_of_each_gpu_with_how_the_reading_went() -> None:
    node = MemoryNode(3)
    reader = node.reader()
    for _ in range(2):
        turn = reader.turn()
        assert gpus(turn) == ["GPU-0", "GPU-1", "GPU-2"]
        assert turn.rows[0].values == {
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
def test_a_lost_gpu_is_told_once_until_it_was_back(code: int) -> None:
    node = MemoryNode()
    reader = node.reader()
    reader.turn()
    node.nvml.gpus[0].lost = code
    turn = reader.turn()
    assert (gpus(turn), told(turn)) == (["GPU-1"], [("gpu_lost", "GPU-0")])
    assert turn.troubles[0].identity == Identity(0, "GPU-0", "serial-0", "Memory GPU", "00000000:01:00.0")
    assert told(reader.turn()) == []
    assert [identity.gpu for identity in reader.present] == ["GPU-1"]
    node.nvml.gpus[0].lost = None
    turn = reader.turn()
    assert (gpus(turn), turn.returned) == (["GPU-0", "GPU-1"], ["GPU-0"])
    assert turn.rows[0].values["scrape_failures_total"] == 2.0
    node.nvml.gpus[0].lost = code
    assert told(reader.turn()) == [("gpu_lost", "GPU-0")]


def test_a_gpu_that_is_lost_from_the_start_is_told_by_what_is_known_of_it() -> None:
    node = MemoryNode()
    node.nvml.gpus[0].lost = 15
    turn = node.reader().turn()
    assert (gpus(turn), told(turn)) == (["GPU-1"], [("gpu_lost", None)])
    known = {0: Identity(0, "GPU-0")}
    assert told(node.reader(known=known).turn()) == [("gpu_lost", "GPU-0")]
    assert told(node.reader(known=known, troubles={"GPU-0": "gpu_lost"}).turn()) == []


def test_a_gpu_that_the_driver_no_longer_lists_is_lost() -> None:
    node = MemoryNode()
    reader = node.reader()
    reader.turn()
    node.nvml.broken = 1
    reader.turn()
    node.nvml.broken = None
    del node.nvml.gpus[0]
    node.clock.pass_(2)
    turn = reader.turn()
    assert (gpus(turn), told(turn)) == (["GPU-1"], [("gpu_lost", "GPU-0")])
    assert "no longer listed" in turn.troubles[0].detail


def test_a_gpu_that_hangs_costs_one_deadline_and_the_others_are_read_in_the_same_turn() -> None:
    node = MemoryNode(3)
    reader = node.reader()
    reader.turn()
    node.hang = {1}
    before_s = node.clock.s
    turn = reader.turn()
    assert (gpus(turn), told(turn)) == (["GPU-0", "GPU-2"], [("nvml_hang", "GPU-1")])
    assert node.clock.s - before_s == GPU_DEADLINE_S
    assert node.children[0].ended
    before_s = node.clock.s
    turn = reader.turn()
    assert (gpus(turn), told(turn), node.clock.s) == (["GPU-0", "GPU-2"], [], before_s)


def test_a_gpu_that_hung_is_tried_again_after_all_others_and_ever_more_rarely() -> None:
    node = MemoryNode(3)
    reader = node.reader()
    reader.turn()
    node.hang = {0}
    reader.turn()
    tries = 0
    for _ in range(240):
        node.clock.pass_(30)
        children = len(node.children)
        turn = reader.turn()
        assert gpus(turn) == ["GPU-1", "GPU-2"]
        assert told(turn) == []
        tries += len(node.children) > children
    assert 3 <= tries <= 10
    node.hang = set()
    node.clock.pass_(3600)
    turn = reader.turn()
    assert (sorted(gpus(turn)), turn.returned) == (["GPU-0", "GPU-1", "GPU-2"], ["GPU-0"])
    node.hang = {0}
    assert told(reader.turn()) == [("nvml_hang", "GPU-0")]


def test_no_further_process_is_risked_while_many_hang_in_the_kernel() -> None:
    node = MemoryNode()
    reader = node.reader()
    reader.turn()
    node.hang = {0}
    reader.turn()
    node.stuck = MAX_STUCK
    node.clock.pass_(7200)
    children = len(node.children)
    assert gpus(reader.turn()) == ["GPU-1"]
    assert len(node.children) == children


def test_a_driver_that_hangs_while_it_is_opened_is_told_once_and_tried_again() -> None:
    node = MemoryNode()
    node.hang = {None}
    reader = node.reader()
    turn = reader.turn()
    assert (gpus(turn), told(turn)) == ([], [("nvml_hang", None)])
    node.clock.pass_(2)
    assert told(reader.turn()) == []
    node.hang = set()
    node.clock.pass_(60)
    turn = reader.turn()
    assert (gpus(turn), turn.returned) == (["GPU-0", "GPU-1"], ["driver"])


def test_a_gpu_over_which_the_library_crashes_is_left_alone_for_a_while() -> None:
    node = MemoryNode()
    reader = node.reader()
    reader.turn()
    node.crash = {0}
    turn = reader.turn()
    assert (gpus(turn), told(turn)) == (["GPU-1"], [])
    node.crash = set()
    node.clock.pass_(61)
    assert sorted(gpus(reader.turn())) == ["GPU-0", "GPU-1"]


@pytest.mark.parametrize("code", [1, 9, 18])
def test_a_driver_that_goes_away_is_opened_anew_with_pauses(code: int) -> None:
    node = MemoryNode()
    reader = node.reader()
    reader.turn()
    node.nvml.broken = code
    assert gpus(reader.turn()) == []
    opened = len(node.children)
    for _ in range(300):
        node.clock.pass_(1)
        assert reader.turn() == Turn()
    assert 5 <= len(node.children) - opened <= 20
    node.nvml.broken, node.nvml.version = None, "590.10"
    node.clock.pass_(60)
    assert gpus(reader.turn()) == ["GPU-0", "GPU-1"]
    assert reader.driver == "590.10"


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (12, "there is no NVIDIA driver: its library libnvidia-ml.so.1 was not found"),
        (9, "the NVIDIA driver is not loaded"),
    ],
)
def test_a_node_that_never_had_a_driver_is_an_error_of_the_user(code: int, what: str) -> None:
    node = MemoryNode()
    node.nvml.broken = code
    with pytest.raises(InputError) as caught:
        node.reader().turn()
    assert str(caught.value) == (
        f"{what} (this node). Install or load the driver (`nvidia-smi` must work for this user), or collect from "
        "elsewhere: `predrain collect exporters` scrapes nodes that run an exporter."
    )


def test_a_gpu_that_only_fails_is_counted_and_stops_nobody() -> None:
    node = MemoryNode()

    def handle(index: int) -> object:
        if index == 0:
            raise NvmlFault(16)
        return node.nvml.gpus[index]

    node.nvml.handle = handle  # type: ignore[method-assign, assignment]  # one odd driver
    reader: NodeReader = node.reader()
    turn = reader.turn()
    assert (gpus(turn), told(turn), dict(reader.errors)) == (["GPU-1"], [], {"reset_required": 1})


def test_the_child_finds_the_program_where_that_is_not_installed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-m", "telemetry.collect.nvml.child"],
        input="", capture_output=True, text=True, cwd=tmp_path, timeout=30, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
