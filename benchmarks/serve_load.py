"""Mixed traffic on a real ``predrain serve`` while it is swapped, killed and runs out of disk.

Run it alone: ``python benchmarks/serve_load.py [--minutes 10]``. A supervisor as systemd's (``Restart=always``) keeps
the service alive; callers ask nodes, score rows in JSON and Arrow, push telemetry and watch. Meanwhile the followed
bundle is replaced every minute, the process is killed (SIGKILL) twice, new scores come, and for a while the disk of its
state is full. Checked: every answer is one that the bundle or the decision it names gives; no request that was under
way came to nothing but at a kill; all telemetry that was acknowledged is there after the restarts, value by value; and
memory does not grow once it is warm. The disk is a tmpfs of its own where this user may mount one; else the size of the
service's files is limited. Ends with a line of JSON, and with an error where anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
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

from benchmarks.load_traffic import Caller, Ledger, Nodes, Rows, Telemetry, watch
from policy.risk_record import ModelName, RiskRecord
from serving.http.model import load_model
from serving.http.rows import FeatureRows
from serving.online.snapshot import read_snapshot
from serving.writing import ScoresFolder, write_decision
from telemetry.store import Dataset

NODES: Final = 200
GROWTH: Final = 0.08
"""Memory may differ by as much between the halves of a process' warm life."""

_SLACK_MIB: Final = 24.0
_KILL_WINDOW_S: Final = 2.0
_DISK: Final = 48 * 2**20
_SEED: Final = 140


@dataclass
class Place:
    """What is served.

    Attributes
    ----------
    folder : Path
        For everything that is made.
    dataset : Path
        Whose GPUs telemetry is pushed for.
    bundles : list of Path
        Two that read the same samples.
    """

    folder: Path
    dataset: Path
    bundles: list[Path]


@dataclass
class Supervisor:
    """Starts the service again whenever it ends, as systemd does, and reads what it writes.

    Attributes
    ----------
    command : list of str
    lives : list of list of (float, float)
        Of each process: when its memory was looked at (monotonic), and MiB of it.
    errors : list of str
        Messages of level ERROR.
    kills : list of float
        When it was killed.
    """

    command: list[str]
    folder: Path
    lives: list[list[tuple[float, float]]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
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


class Disk:
    """The disk of the state, which can be full: a tmpfs where it may be mounted, else a limit of the size of files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(folder)]
        done = subprocess.run(["mount", *options], capture_output=True, check=False)  # noqa: S603, S607 - no shell
        self.mounted = done.returncode == 0

    def fill(self, process: subprocess.Popen[bytes]) -> None:
        """Leave no room."""
        if not self.mounted:
            hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, hard))
            return
        with contextlib.suppress(OSError), (self.folder / "ballast").open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(4096))

    def free(self, process: subprocess.Popen[bytes]) -> None:
        """Make room again."""
        if not self.mounted:
            hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
            return
        (self.folder / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount."""
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=False)  # noqa: S603, S607 - no shell


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
    return Place(folder, folder / "fleet", [folder / "lightgbm", folder / "logistic"])


def run_load(place: Place, seconds: float, rate: float) -> dict[str, Any]:
    """Run the load; return what was seen, with ``faults`` in words and ``line``, the line of JSON."""
    folder = place.folder
    disk = Disk(folder / "state")
    try:
        return _run_load(place, disk, seconds, rate)
    finally:
        disk.close()


def _run_load(place: Place, disk: Disk, seconds: float, rate: float) -> dict[str, Any]:
    folder, port, ledger = place.folder, free_port(), Ledger()
    risks: dict[str, float] = {}
    shutil.copytree(place.bundles[0], folder / "served")
    write_scores(folder / "scores", risks, 0)
    supervisor = Supervisor(
        [sys.executable, "-c", "from predrain.command import main; main()", "serve", "--scores", "scores",
         "--model", "served", "--state", str(disk.folder), "--dataset", str(place.dataset), "--port", str(port),
         "--no-extender"],
        folder,
    )  # fmt: skip
    models = {model.digest: model for model in map(load_model, place.bundles)}
    columns = next(iter(models.values())).columns
    rows = Rows(columns, {digest: _scorer(model) for digest, model in models.items()})
    pushes = Telemetry(*_pushed(place.dataset), ledger)
    nodes = Nodes(NODES, risks)
    supervisor.start()
    stop = threading.Event()
    try:
        _until(lambda: _ready(port), 90, "the service is not ready")
        shares = {nodes.ask: 0.5, rows.ask: 0.3, pushes.ask: 0.1, watch: 0.1}
        callers = [
            Caller(port, make, rate * share / (2 if share >= 0.3 else 1), ledger, stop)
            for make, share in shares.items()
            for _ in range(2 if share >= 0.3 else 1)
        ]
        for caller in callers:
            caller.start()
        full = _events(place, disk, supervisor, ledger, risks, seconds)
        stop.set()
        for caller in callers:
            caller.join(60)
        kept = _checked_after_kill(port, supervisor, ledger)
        code = supervisor.stop()
    finally:
        stop.set()
        supervisor.close()
    return _judged(ledger, supervisor, disk, full, kept, code, seconds)


def _events(
    place: Place, disk: Disk, supervisor: Supervisor, ledger: Ledger, risks: dict[str, float], seconds: float
) -> dict[str, int]:
    """Do to the service what it must bear, while callers ask; return what was refused while its disk was full."""
    began = time.monotonic()
    swap_s, score_s = max(4.0, min(60.0, seconds / 8)), max(2.0, min(20.0, seconds / 20))
    plan = [(at * swap_s, "swap") for at in range(1, int(seconds / swap_s) + 1)]
    plan += [(at * score_s, "score") for at in range(1, int(seconds / score_s) + 1)]
    plan += [(0.3 * seconds, "kill"), (0.75 * seconds, "kill"), (0.5 * seconds, "fill"), (0.62 * seconds, "free")]
    swaps = decisions = 0
    before: dict[str, int] = {}
    full: dict[str, int] = {}
    for at, what in sorted(plan):
        time.sleep(max(0.0, began + at - time.monotonic()))
        process = supervisor.process
        assert process is not None
        if what == "swap":
            swaps += 1
            swap_bundle(place.bundles[swaps % 2], place.folder / "served")
        elif what == "score":
            decisions += 1
            write_scores(place.folder / "scores", risks, decisions)
        elif what == "kill":
            supervisor.kill()
        elif what == "fill":
            before = _statuses(ledger)
            disk.fill(process)
        else:
            disk.free(process)
            full = {name: count - before.get(name, 0) for name, count in _statuses(ledger).items()}
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    full["swaps"], full["decisions"] = swaps, decisions
    return full


def _statuses(ledger: Ledger) -> dict[str, int]:
    with ledger.lock:
        return {f"{kind} {status}": count for (kind, status), count in ledger.answers.items()}


def _checked_after_kill(port: int, supervisor: Supervisor, ledger: Ledger) -> dict[str, Any]:
    """Kill the idle service, and compare what it holds after its restart with what it held before."""
    _until(lambda: _stored(port) is not None, 60, "the service does not tell what it holds")
    held = _stored(port)
    supervisor.kill()
    _until(
        lambda: supervisor.process is not None and supervisor.process.poll() is None and _ready(port), 90, "no restart"
    )
    again = _stored(port)
    return {"held": held, "after_kill": again, "acked": ledger.stored, "unsure": ledger.unsure}


def _judged(
    ledger: Ledger, supervisor: Supervisor, disk: Disk, full: dict[str, int], kept: dict[str, Any], code: int,
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    faults = [f"a wrong answer: {each}" for each in ledger.wrong[:5]]
    near = [each for each in ledger.dropped if any(-0.1 < each - kill < _KILL_WINDOW_S for kill in supervisor.kills)]
    if len(near) < len(ledger.dropped):
        faults.append(f"{len(ledger.dropped) - len(near)} requests came to nothing without a kill")
    if kept["after_kill"] != kept["held"] or not 0 <= kept["held"] - kept["acked"] <= kept["unsure"]:
        faults.append(f"samples are lost: {kept}")
    missing, compared = _missing(disk.folder / "online", ledger)
    if missing or not compared:
        faults.append(f"{missing} of {compared} acknowledged samples are not in the state")
    if code != 0:
        faults.append(f"it ended with {code}")
    if not full.get("telemetry 503"):
        faults.append("nothing was refused while the disk was full")
    faults += [f"it logged an error: {each}" for each in supervisor.errors[:3]]
    growth = [_growth(life) for life in supervisor.lives]
    faults += [
        f"memory grew from {first:.0f} to {last:.0f} MiB in a life"
        for first, last in (each for each in growth if each is not None)
        if last - first > max(GROWTH * first, _SLACK_MIB)
    ]
    answered = sum(ledger.answers.values())
    took = np.sort(np.array(ledger.took_s)) * 1e3
    return {
        "faults": faults,
        "answers": _statuses(ledger),
        "full": full,
        "disk": "tmpfs" if disk.mounted else "a limit of file sizes",
        "in_flight": len(near),
        "kept": kept | {"compared": compared},
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
    print(f"while the disk was full ({found['disk']}): {found['full']}")
    print(f"requests under way at a kill: {found['in_flight']}; telemetry: {found['kept']}")
    print(f"memory of each life, MiB, early and late: {[tuple(map(round, each)) for each in found['memory']]}")
    print(f"node look-ups: p99 {found['p99_ms']:.1f} ms (load average {os.getloadavg()[0]:.1f})")
    print(f"faults: {found['faults'] or 'none'}")


def _growth(life: list[tuple[float, float]]) -> tuple[float, float] | None:
    """Give a process' memory early and late in its warm life; None where that was too short to tell."""
    if not life or life[-1][0] - life[0][0] < 20:
        return None
    warm = [mib for at, mib in life if at - life[0][0] > min(30.0, 0.5 * (life[-1][0] - life[0][0]))]
    third = max(1, len(warm) // 3)
    return float(np.median(warm[:third])), float(np.median(warm[-third:]))


def _missing(folder: Path, ledger: Ledger) -> tuple[int, int]:
    """Count acknowledged samples that the snapshot lacks, of those whose step is not over; and those compared."""
    snapshot = read_snapshot(folder)
    waiting, closed = snapshot.held.waiting, snapshot.held.closed_ms or 0
    step_ms = int(snapshot.config.step / timedelta(milliseconds=1))
    pairs = snapshot.held.pairs
    there: dict[tuple[str, int], float] = {}
    if waiting is not None:
        for series in waiting.series.values():
            for unit, ms, value, valid in zip(waiting.unit, waiting.ms, series.values, series.valid, strict=True):
                if valid:
                    there[pairs[int(unit)][1], int(ms)] = float(value)
    asked = {key: value for key, value in ledger.acked.items() if -(-key[1] // step_ms) * step_ms > closed}
    wrong = sum(key not in there or abs(there[key] - value) > 1e-3 for key, value in asked.items())
    return wrong, len(asked)


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
            unit=f"GPU-{node}", gpu=f"GPU-{node}", node=f"n{node}", slot="0", status="ok", why_unknown=None, risk=risk,
            risks={}, score=-7.0, rank=node + 1, alert=False, tier="clear", decision_time=now, issued_at=now,
            expires_at=now + timedelta(hours=12), horizon=timedelta(hours=24), model=ModelName("0" * 64, "lightgbm"),
            sample_age_s=60.0, completeness=1.0,
        )
        for node in range(NODES)
    ]  # fmt: skip
    with scores.building(now) as swap:
        write_decision(swap.path, records, {"format": 1, "units": len(records)})
        swap.commit()
    scores.point_to_newest()


def free_port() -> int:
    """Give a port that nobody listens on."""
    import socket  # noqa: PLC0415 - here alone

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _pushed(dataset: Path) -> tuple[list[tuple[str, str]], str, float, float]:
    """Give units in service, and a channel with the values that it may have."""
    held = Dataset.open(dataset)
    inventory = held.inventory()
    here = inventory[inventory["removed_at"].isna()]
    units = list(zip(here["node"].astype(str), here["gpu"].astype(str), strict=True))
    channel = next(each for each in held.meta.channels.values() if each.kind == "gauge")
    low = 0.0 if channel.low is None else float(channel.low)
    return units, channel.name, low, low + 50.0 if channel.high is None else float(channel.high)


def _scorer(model: Any) -> Any:
    def score(values: np.ndarray, units: list[str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = model.score(FeatureRows(values, units, np.zeros(len(units), np.int64), False))
        return found

    return score


def _asked_once(port: int, path: str) -> tuple[int, bytes]:
    import http.client  # noqa: PLC0415 - as the callers have it

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def _ready(port: int) -> bool:
    return _asked_once(port, "/readyz")[0] == 200


def _stored(port: int) -> int | None:
    """Give how many pushed samples the state says that it has stored."""
    for line in _asked_once(port, "/metrics")[1].decode().splitlines():
        if line.startswith('predrain_online_samples_total{fate="stored"}'):
            return round(float(line.rsplit(" ", 1)[1]))
    return None


def _until(what: Any, seconds: float, words: str) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError(words)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
