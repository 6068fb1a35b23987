"""How fast nodes are marked and given back through a real Slurm controller, beside a bare ``scontrol update``.

Run it alone: ``python benchmarks/actuate_slurm.py [--quick]``. It starts munged and slurmctld (no slurmd: nothing runs,
and nothing has to) with nodes of 8 GPUs, and does to each of some nodes what a controller does: the node and its jobs
are read, what would be written is worked out, and under the lock of the lease it is read again, written in one request
and read back. Beside it, in the same run, stands ``scontrol update State=DRAIN`` alone, which reads nothing and asks
nobody. Before anything is timed, what stands on a marked node is compared with what was announced, and a node that was
given back with what it was before.

Slurm 22.05 cannot tell a single node in JSON, so that each reading lists all of them; later versions can.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from policy.fleet import Level
from policy.plan import Action
from scheduler.ports.clock import SystemClock
from scheduler.ports.readings import Precondition
from scheduler.slurm.marks import standing_on
from scheduler.slurm.node import SlurmNode
from scheduler.slurm.scheduler import SlurmScheduler, open_slurm
from scheduler.slurm.settings import SlurmSettings
from tests.system.slurm_cluster import SlurmCluster, why_not

NODES: Final = 1500
QUICK_NODES: Final = 200
MARKED: Final = 20
_HOLDER: Final = "benchmark"
_LEASE: Final = timedelta(minutes=5)
_THEIRS: Final = '{"rack": "r7", "owner": {"team": "a"}}'


class BareController(SlurmCluster):
    """slurmctld without a slurmd; its nodes are idle and do not answer pings, which no write asks for."""

    def __enter__(self) -> BareController:
        """Start it, and wait until every node takes writes."""
        try:
            self._lay_out()
            conf = self.root / "slurm.conf"
            conf.write_text(conf.read_text().replace("SlurmdTimeout=10", "SlurmdTimeout=0"))
            self._start_munge()
            self.start_controller()
            self.wait(lambda: len(self.states()) == len(self.nodes), 60)
            self.run("scontrol", "update", "nodename=ALL", "state=down", "reason=begin")
            self.run("scontrol", "update", "nodename=ALL", "state=resume", f"extra={_THEIRS}")
        except BaseException:
            self.stop()
            raise
        return self


def an(verb: str, node: str) -> Action:
    """Give an action as a decision does."""
    level = {"publish": 1, "soft_taint": 2, "taint": 3, "release": 0}[verb]
    end = None if verb == "release" else datetime.now(UTC) + timedelta(hours=6)
    return Action(verb, node, "high", Level(level), 0.83, end, ("corrected errors of GPU 3 rise",))  # type: ignore[arg-type]


def act(scheduler: SlurmScheduler, action: Action) -> None:
    """Do one action as the controller does: re-read, work out, apply; end the run where it is not done."""
    reading = scheduler.revalidate(action.node)
    if reading is None or not scheduler.preview((action,), reading)[0]:
        sys.exit(f"there is nothing to write for {action.verb} on {action.node}")
    until = scheduler.hold_lease(_HOLDER, _LEASE)
    if until is None:
        sys.exit("the lease is not to be had")
    answer = scheduler.apply(action, Precondition(reading.version, reading.boot_id, reading.view.marks, _HOLDER, until))
    if answer.kind != "done":
        sys.exit(f"{action.verb} on {action.node}: {answer.kind}: {answer.words}")


def check(scheduler: SlurmScheduler, name: str) -> None:
    """End the run where marks are not what was announced, or a node given back is not what it was."""
    before = node_of(scheduler, name)
    for verb in ("publish", "soft_taint", "taint"):
        act(scheduler, an(verb, name))
    node = node_of(scheduler, name)
    marks = standing_on(node, datetime.now(UTC)).marks
    if not (marks.soft and marks.tainted and "DRAIN" in node.states and node.weight == before.weight + 1_000_000):
        sys.exit(f"{name} does not carry what was announced: {node}")
    act(scheduler, an("release", name))
    after = node_of(scheduler, name)
    kept = ("states", "reason", "extra", "weight")
    if any(getattr(after, each) != getattr(before, each) for each in kept) or after.extra != _THEIRS:
        sys.exit(f"{name} was not given back as it was: {before} -> {after}")


def node_of(scheduler: SlurmScheduler, name: str) -> SlurmNode:
    """Read a node, which is there."""
    node = scheduler.port.node(name)
    if node is None:
        sys.exit(f"there is no node {name}")
    return node


def seconds(calls: list[Callable[[], object]]) -> np.ndarray:
    """Time each call by the wall."""
    taken = []
    for call in calls:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return np.array(taken)


def main() -> None:
    """Check, measure, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller cluster")
    quick = parser.parse_args().quick
    missing = why_not()
    if missing is not None:
        sys.exit(missing)
    size = QUICK_NODES if quick else NODES
    with tempfile.TemporaryDirectory(prefix="sb", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        with BareController(root, nodes=size, gpus=1) as cluster:
            shared = root / "shared"
            shared.mkdir()
            os.environ["PATH"] = cluster.environment["PATH"]
            scheduler = open_slurm(SlurmSettings(str(shared), slurm_conf=str(root / "slurm.conf")), SystemClock())
            check(scheduler, "n1")
            bare = cluster.nodes[-MARKED:]
            ours = cluster.nodes[1 : MARKED + 1]
            fleet = seconds([scheduler.read_fleet] * 3)
            plain = seconds([lambda n=n: cluster.update(n, state="drain", reason="theirs") for n in bare])
            marked = seconds([lambda n=n: act(scheduler, an("taint", n)) for n in ours])
            given_back = seconds([lambda n=n: act(scheduler, an("release", n)) for n in ours])
            for name in bare:
                if node_of(scheduler, name).reason != "theirs":
                    sys.exit(f"the foreign reason on {name} is gone")
    rows = {
        f"reading {size:,} nodes": fleet,
        "drain mark of ours": marked,
        "release of ours": given_back,
        "bare scontrol update": plain,
    }
    print(f"{'':<24}{'mean ms':>10}{'p99 ms':>10}{'a second':>10}")
    for name, taken in rows.items():
        print(f"{name:<24}{taken.mean() * 1e3:>10.1f}{np.quantile(taken, 0.99) * 1e3:>10.1f}{1 / taken.mean():>10.1f}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"memory of the controller's process at its peak: {peak:.0f} MB")
    line = {
        "name": "actuate_slurm",
        "value": round(1 / marked.mean(), 2),
        "unit": f"drain marks/s, {size:,} nodes",
        "peer": "scontrol update alone, nothing read",
        "ratio": round(float(plain.mean() / marked.mean()), 3),
        "limit_share": None,
        "checked": True,
        "others": {
            "mark p99 s": round(float(np.quantile(marked, 0.99)), 3),
            "releases/s": round(1 / given_back.mean(), 2),
            "fleet read s": round(float(fleet.mean()), 3),
            "memory MB": round(peak),
        },
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
