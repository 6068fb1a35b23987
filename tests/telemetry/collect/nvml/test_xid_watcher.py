"""XIDs are heard whatever happens to single GPUs, to the driver or to the process that listens."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime

from telemetry.collect.nvml.library import NvmlFault
from telemetry.collect.nvml.xid_watcher import Xid, XidWatcher
from tests.telemetry.collect.nvml.helpers import MemoryNode


def listen(node: MemoryNode, enough: Callable[[list[Xid]], bool]) -> list[Xid]:
    """Run a watcher until enough was heard; never longer than some thousand pauses."""
    heard: list[Xid] = []
    pauses = 0

    def tell(xid: Xid) -> None:
        heard.append(xid)
        if enough(heard):
            watcher.stop()

    def pause(s: float) -> None:
        nonlocal pauses
        pauses += 1
        node.clock.pass_(s)
        if pauses > 1000:
            watcher.stop()

    watcher = XidWatcher(node.spawn, tell, monotonic=node.clock.monotonic, sleep=pause)
    thread = threading.Thread(target=watcher.run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return heard


def codes(heard: list[Xid]) -> list[tuple[str | None, int]]:
    return [(xid.gpu, xid.xid) for xid in heard]


def test_an_xid_is_of_its_gpu_and_of_the_moment_of_the_wait_s_return() -> None:
    node = MemoryNode()
    node.nvml.events = [(node.nvml.gpus[1], 79, None), (node.nvml.gpus[0], 31, 3)]
    heard = listen(node, lambda heard: len(heard) == 2)
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert heard == [Xid(epoch, "GPU-1", 79, None), Xid(epoch, "GPU-0", 31, 3)]


def test_a_lost_gpu_does_not_make_the_others_deaf() -> None:
    node = MemoryNode()
    node.nvml.gpus[0].lost = 15
    node.nvml.events = [NvmlFault(15), (node.nvml.gpus[1], 63, None)]
    assert codes(listen(node, lambda heard: len(heard) == 1)) == [("GPU-1", 63)]


def test_a_gpu_without_events_does_not_make_the_others_deaf() -> None:
    node = MemoryNode()
    node.nvml.gpus[0].watchable = False
    node.nvml.events = [(node.nvml.gpus[1], 63, None)]
    assert codes(listen(node, lambda heard: len(heard) == 1)) == [("GPU-1", 63)]


def test_after_a_reload_or_a_crash_all_are_registered_anew() -> None:
    node = MemoryNode()
    node.nvml.events = [
        (node.nvml.gpus[0], 1, None),
        NvmlFault(1),
        (node.nvml.gpus[1], 2, None),
        NvmlFault(999),
        (node.nvml.gpus[0], 3, None),
    ]
    assert [xid.xid for xid in listen(node, lambda heard: len(heard) == 3)] == [1, 2, 3]
    assert len(node.children) == 3
    assert all(child.ended for child in node.children)


def test_a_gpu_over_which_registering_hangs_is_left_out() -> None:
    node = MemoryNode()
    node.hang = {0}
    node.nvml.events = [(node.nvml.gpus[1], 63, None)]
    assert codes(listen(node, lambda heard: len(heard) == 1)) == [("GPU-1", 63)]


def test_an_xid_of_a_gpu_that_is_not_listed_is_kept_without_one() -> None:
    from tests.telemetry.collect.nvml.memory_nvml import MemoryGpu

    node = MemoryNode()
    node.nvml.events = [(MemoryGpu("GPU-9"), 79, None)]
    assert codes(listen(node, lambda heard: len(heard) == 1)) == [(None, 79)]
