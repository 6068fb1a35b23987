"""Mixed traffic on a real ``predrain serve`` while its model is swapped and it is killed.

Run it alone: ``python benchmarks/serve_load.py [--minutes 10]``. A supervisor as systemd's (``Restart=always``) keeps
the service alive; callers ask nodes, score rows in JSON and Arrow, and watch. Meanwhile the followed bundle is
replaced every minute, the process is killed (SIGKILL) twice, and new scores come. Checked: every answer is one that
the bundle or the decision it names gives; no request that was under way came to nothing but at a kill; and memory does
not grow once it is warm. Ends with a line of JSON, and with an error where anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.load_traffic import Caller, Ledger, Nodes, Rows, watch
from benchmarks.own_process import asked_once, free_port
from policy.risk_record import ModelName, RiskRecord
from serving.champion.model import FeatureRows, load_model
from serving.scores.writing import ScoresFolder, write_decision

NODES: Final = 200
GROWTH: Final = 0.08
"""Memory may differ by as much between the halves of a process' warm life."""

_SLACK_MIB: Final = 24.0
_SETTLED_S: Final = 5.0
_KILL_WINDOW_S: Final = 2.0
_SEED: Final = 140


@dataclass
class Place:
    """What is served.

    ``folder``: for everything that is made.
    ``bundles``: two of the same features.
    """

    folder: Path
    bundles: list[Path]


def main() -> None:
    """Prepare, run the load, print what was seen, and fail where something is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=40.0, help="requests a second, in all")
    parser.add_argument("--quick", action="store_true", help="one minute")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="serve-load-") as made:
        found = run_load(prepare(Path(made)), 60 * (1.0 if given.quick else given.minutes), given.rate)
    show(found)
    print(json.dumps(found["line"]))
    if found["faults"]:
        sys.exit("\n".join(found["faults"]))


def prepare(folder: Path) -> Place:
    """Simulate a fleet and train two bundles on it."""
    predrain = [sys.executable, "-c", "from predrain.command import main; main()"]
    for name in ("lightgbm", "logistic"):
        models = f"profile: {name}, learners: [{name}], parallel: {{members: [{name}]}}, cascade: {{stages: [{name}]}}"
        (folder / f"{name}.yaml").write_text(f"models: {{{models}}}\n")
    for words in (
        ["simulate", "--gpus", "32", "--days", "40", "--acceleration", "60", "--seed", str(_SEED), "--out", "fleet"],
        ["features", "--dataset", "fleet", "--out", "matrix"],
        ["train", "--matrix", "matrix", "--out", "lightgbm", "--params", "lightgbm.yaml"],
        ["train", "--matrix", "matrix", "--out", "logistic", "--params", "logistic.yaml"],
    ):
        subprocess.run([*predrain, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own
    return Place(folder, [folder / "lightgbm", folder / "logistic"])


def run_load(place: Place, seconds: float, rate: float) -> dict[str, Any]:
    """Run the load; return what was seen, with ``faults`` in words and ``line``, the line of JSON."""
    folder, port, ledger = place.folder, free_port(), Ledger()
    risks: dict[str, float] = {}
    shutil.copytree(place.bundles[0], folder / "served")
    write_scores(folder / "scores", risks, 0)
    supervisor = Supervisor(
        [sys.executable, "-c", "from predrain.command import main; main()", "serve", "--scores", "scores",
         "--model", "served", "--listen", f"127.0.0.1:{port}", "--no-extender"],
        folder,
    )  # fmt: skip
    models = {model.digest: model for model in map(load_model, place.bundles)}
    columns = next(iter(models.values())).columns
    rows = Rows(columns, {digest: _scorer(model) for digest, model in models.items()})
    nodes = Nodes(NODES, risks)
    supervisor.start()
    stop = threading.Event()
    try:
        _until(lambda: _ready(port), 90, "the service is not ready")
        shares = {nodes.ask: 0.5, rows.ask: 0.4, watch: 0.1}
        callers = [
            Caller(port, make, rate * share / (2 if share >= 0.3 else 1), ledger, stop)
            for make, share in shares.items()
            for _ in range(2 if share >= 0.3 else 1)
        ]
        for caller in callers:
            caller.start()
        done = _events(place, supervisor, risks, seconds)
        stop.set()
        for caller in callers:
            caller.join(60)
        code = supervisor.stop()
    finally:
        stop.set()
        supervisor.close()
    return judged(ledger, supervisor, done, code, seconds)


def _events(place: Place, supervisor: Supervisor, risks: dict[str, float], seconds: float) -> dict[str, int]:
    """Swap, score and kill while callers ask; return how often."""
    began = time.monotonic()
    swap_s, score_s = max(4.0, min(60.0, seconds / 8)), max(2.0, min(20.0, seconds / 20))
    plan = [(at * swap_s, "swap") for at in range(1, int(seconds / swap_s) + 1)]
    plan += [(at * score_s, "score") for at in range(1, int(seconds / score_s) + 1)]
    plan += [(0.3 * seconds, "kill"), (0.75 * seconds, "kill")]
    swaps = decisions = 0
    for at, what in sorted(plan):
        time.sleep(max(0.0, began + at - time.monotonic()))
        if what == "swap":
            swaps += 1
            supervisor.swaps.append(time.monotonic())
            swap_bundle(place.bundles[swaps % 2], place.folder / "served")
        elif what == "score":
            decisions += 1
            write_scores(place.folder / "scores", risks, decisions)
        else:
            supervisor.kill()
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    return {"swaps": swaps, "decisions": decisions, "kills": len(supervisor.kills)}


def swap_bundle(bundle: Path, target: Path) -> None:
    """Replace a bundle's folder as ``predrain train --out`` does: by renaming."""
    building, old = target.with_name(".building"), target.with_name(".old")
    shutil.copytree(bundle, building)
    target.rename(old)
    building.rename(target)
    shutil.rmtree(old)


def write_scores(folder: Path, risks: dict[str, float], number: int) -> None:
    """Write a decision about the nodes with a risk of its own."""
    scores, now = ScoresFolder(folder), datetime.now(UTC).replace(microsecond=0)
    risk = round(0.001 * (number % 900 + 1), 6)
    name = now.strftime("%Y%m%dT%H%M%SZ")
    if name in risks:
        return
    risks[name] = risk  # known before anybody can be answered from it
    records = [
        RiskRecord(
            unit=f"GPU-{node}", gpu=f"GPU-{node}", node=f"n{node}", slot="0", status="ok", unknown_reason=None,
            risk=risk, risks={}, score=-7.0, rank=node + 1, alert=False, tier="clear", decision_time=now, issued_at=now,
            expires_at=now + timedelta(hours=12), horizon=timedelta(hours=24), model=ModelName("0" * 64, "lightgbm"),
            sample_age_seconds=60.0, completeness=1.0,
        )
        for node in range(NODES)
    ]  # fmt: skip
    with scores.building(now) as swap:
        write_decision(swap.path, records, {"format": 2, "units": len(records)})
        swap.commit()
    scores.point_to_newest()


def _scorer(model: Any) -> Any:
    def score(values: np.ndarray, units: list[str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = model.score(FeatureRows(values, units, np.zeros(len(units), np.int64), False))
        return found

    return score


def _ready(port: int) -> bool:
    return asked_once(port, "/readyz")[0] == 200


def _until(what: Any, seconds: float, words: str) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError(words)
        time.sleep(0.2)


@dataclass
class Supervisor:
    """Starts the service again whenever it ends, as systemd does, and reads what it writes.

    ``lives``: of each process: when its memory was looked at (monotonic), and MiB of it.
    """

    command: list[str]
    folder: Path
    lives: list[list[tuple[float, float]]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    swaps: list[float] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Begin."""
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._supervise, self._weigh)]
        for thread in self._threads:
            thread.start()

    def kill(self) -> None:
        """Kill the process, as the kernel does where memory runs out."""
        assert self.process is not None
        self.kills.append(time.monotonic())
        self.process.kill()

    def stop(self) -> int:
        """End it orderly; return its exit code."""
        self.ended.set()
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(60)
        self.close()
        return code

    def close(self) -> None:
        """End whatever is left."""
        self.ended.set()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        for thread in self._threads:
            thread.join(20)

    def _supervise(self) -> None:
        while not self.ended.is_set():
            self.lives.append([])
            with subprocess.Popen(  # noqa: S603 - our own command
                self.command, cwd=self.folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
            ) as process:
                self.process = process
                assert process.stderr is not None
                for line in process.stderr:
                    if b'"level":"ERROR"' in line or b'"level": "ERROR"' in line or line.startswith(b"Traceback"):
                        self.errors.append(line.decode(errors="replace")[:2000])
            self.ended.wait(0.3)

    def _weigh(self) -> None:
        while not self.ended.wait(0.5):
            process = self.process
            if process is None or not self.lives:
                continue
            with contextlib.suppress(OSError, StopIteration, IndexError):
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                kib = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
                self.lives[-1].append((time.monotonic(), kib / 1024))


def judged(
    ledger: Ledger, supervisor: Supervisor, done: dict[str, int], code: int, seconds: float
) -> dict[str, Any]:  # fmt: skip
    """Compare what was answered and held with what must hold; ``faults`` says in words where it does not."""
    faults = [f"a wrong answer: {each}" for each in ledger.wrong[:5]]
    near = [each for each in ledger.dropped if any(-0.1 < each - kill < _KILL_WINDOW_S for kill in supervisor.kills)]
    if len(near) < len(ledger.dropped):
        faults.append(f"{len(ledger.dropped) - len(near)} requests came to nothing without a kill")
    if code != 0:
        faults.append(f"it ended with {code}")
    faults += [f"it logged an error: {each}" for each in supervisor.errors[:3]]
    growth = [_growth(life, supervisor.swaps) for life in supervisor.lives]
    faults += [
        f"memory grew from {first:.0f} to {last:.0f} MiB in a life"
        for first, last in (each for each in growth if each is not None)
        if last - first > max(GROWTH * first, _SLACK_MIB)
    ]
    answered = sum(ledger.answers.values())
    took = np.sort(np.array(ledger.took_s)) * 1e3
    return {
        "faults": faults,
        "answers": statuses(ledger),
        "done": done,
        "in_flight": len(near),
        "memory": [each for each in growth if each is not None],
        "p99_ms": float(np.quantile(took, 0.99)) if took.size else None,
        "line": {
            "name": "serve_load", "value": answered, "unit": f"requests answered in {seconds:g} s, none wrong",
            "peer": None, "ratio": None, "limit_share": None, "checked": not faults,
        },
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    """Print what was seen."""
    for what, count in sorted(found["answers"].items()):
        print(f"{what:<28}{count:>9,}")
    print(f"meanwhile: {found['done']}; requests under way at a kill: {found['in_flight']}")
    print(f"memory of each life, MiB, early and late: {[tuple(map(round, each)) for each in found['memory']]}")
    print(f"node look-ups: p99 {found['p99_ms']:.1f} ms (load average {os.getloadavg()[0]:.1f})")
    print(f"faults: {found['faults'] or 'none'}")


def statuses(ledger: Ledger) -> dict[str, int]:
    """Count answers by kind and status."""
    with ledger.lock:
        return {f"{kind} {status}": count for (kind, status), count in ledger.answers.items()}


def _growth(life: list[tuple[float, float]], swaps: list[float]) -> tuple[float, float] | None:
    """Give a process' memory early and late in its warm life; None where that was too short to tell.

    A bundle of other learners imports their libraries once: a life is warm when it has served both bundles for a while.
    """
    if not life or life[-1][0] - life[0][0] < 20:
        return None
    swapped = [at for at in swaps if at > life[0][0] + _SETTLED_S][:2]
    if len(swapped) < 2:
        return None
    warm = [mib for at, mib in life if at > swapped[1] + _SETTLED_S]
    if len(warm) < 6:
        return None
    third = max(1, len(warm) // 3)
    return float(np.median(warm[:third])), float(np.median(warm[-third:]))


if __name__ == "__main__":
    main()
