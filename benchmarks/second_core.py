"""What the second core gives a build of features, and what holds it back: Python's lock, memory, or nothing to do.

A fleet is simulated, and its matrix, all feature groups of params.yaml, is built by one thread on one core (Arrow and
Numba on one as well); by two threads, as shipped; and twice at once, by two such processes of one thread, a core each.
Two processes share neither Python's lock nor a map of memory: what they gain, the machine gives, and what two threads
gain less is theirs. Beside it what two threads gain that only calculate, copy memory, or take new pages from the
system; and, of one more build by two threads, what its threads wait for while a core is free: every 10 ms the kernel is
asked for the system call and the address that each waits at, which for Python's lock lies in Python's own data
(x86-64 Linux; a thread that waits for a core counts as running, so on a busy machine the waits look smaller than they
are). All in processes of their own, which have built a small matrix before; the median of the runs counts, taken in
turns.

    python benchmarks/second_core.py [--quick] [--gpus N] [--times N] [--work FOLDER]

Checked before anything is told: two threads give the bytes that one gives.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a file, this folder's parent is not on the path
    sys.path.insert(0, str(ROOT))

import numba  # noqa: E402
import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402

from benchmarks.features_extend_day import equal  # noqa: E402
from benchmarks.own_process import told_by  # noqa: E402
from features.engine import Item, LocalEngine, Result  # noqa: E402
from pipeline.matrix_stage import make_matrix  # noqa: E402
from pipeline.params import load_params  # noqa: E402
from simulator.simulate import simulate  # noqa: E402
from telemetry.store import Dataset  # noqa: E402

DAYS = 120
PHASES = ("rows and plan", "buckets", "slabs")
WAYS: dict[str, tuple[int | None, ...]] = {"one thread": (0,), "two threads": (None,), "two processes": (0, 1)}
"""Of each, the core of every process; None: all cores, and threads as shipped."""

SPENT = ("wall", "user", "system", "faults", "voluntary", "involuntary", "stolen")
COUNTS = SPENT[3:6]
MEMORY = {"-1", "9", "10", "11", "12", "25", "28"}
"""System calls of x86-64 in which a thread waits for pages (-1: none, so a page fault) or for the map of memory."""
IDLE = {"202", "7", "23", "35", "230", "232", "270", "271", "281"}
"""Those in which it waits for a lock, for another thread, or for the clock."""
CAUSES = ("Python's lock", "pages", "files")


class OneThread(LocalEngine):
    """Runs one task after the other."""

    def each(
        self, job: Callable[[Item], Result], items: Sequence[Item], told: Callable[[Item, Result], None], *, most: int
    ) -> None:
        """Run a function over items, by one thread."""
        super().each(job, items, told, most=min(most, 1))


def spent() -> list[float]:
    """Return what :data:`SPENT` names up to now: of this process, but for the seconds stolen of the whole machine."""
    usage = getrusage(RUSAGE_SELF)
    stolen = int(Path("/proc/stat").read_text(encoding="utf-8").split()[8]) / os.sysconf("SC_CLK_TCK")
    own = [usage.ru_utime, usage.ru_stime, usage.ru_minflt, usage.ru_nvcsw, usage.ru_nivcsw]
    return [time.perf_counter(), *own, stolen]


def build(dataset: Path, out: Path, small: Path, core: int | None, together: int) -> None:
    """Build a matrix in this process, on one core if one is named, and print what it took as JSON."""
    if core is not None:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core]})
        pa.set_cpu_count(1)
        pa.set_io_thread_count(1)
        numba.set_num_threads(1)
    engine, params = LocalEngine() if core is None else OneThread(), load_params([ROOT / "params.yaml"])
    with tempfile.TemporaryDirectory() as name:
        make_matrix(small, params, Path(name) / "matrix", engine=engine)
    lock = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    end = next(int(upto, 16) for begin, upto in maps if int(begin, 16) <= lock < int(upto, 16))
    started = out.parents[1] / "started"
    (started / f"{os.getpid()}.new").write_text(json.dumps([os.getpid(), lock, end]), encoding="utf-8")
    (started / f"{os.getpid()}.new").rename(started / f"{os.getpid()}.json")
    latest = time.monotonic() + 600
    while len(list(started.glob("*.json"))) < together:
        if time.monotonic() > latest:
            sys.exit("the other process has not begun within ten minutes")
        time.sleep(0.001)
    samples, marks, dones = Dataset.open(dataset).meta.counts["samples"], [spent()], [-1]

    def reached(done: int, _total: int) -> None:
        marks.append(spent())
        dones.append(done)

    make_matrix(dataset, params, out, engine=engine, progress=reached)
    last = next(number for number, done in enumerate(dones) if done >= samples)
    tails = (0.0, marks[last][0] - marks[last - 1][0], marks[-1][0] - marks[-2][0])
    marks.append(spent())
    told = {name: after - before for name, before, after in zip(SPENT, marks[0], marks[-1], strict=True)}
    phases = pairwise((marks[0], marks[1], marks[last], marks[-1]))
    for phase, tail, (before, after) in zip(PHASES, tails, phases, strict=True):
        cpu = after[1] + after[2] - before[1] - before[2]
        told |= {phase: after[0] - before[0], f"{phase} cpu": cpu, f"{phase} tail": tail}
    print(json.dumps(told))


def waits(folder: Path, build: Future[dict[str, float]]) -> dict[str, float]:
    """Watch a build; give the share of both cores' time that it ran, and that each cause of a wait left free."""
    found: Counter[str] = Counter()
    while not (begun := list(folder.glob("*.json"))) and not build.done():
        time.sleep(0.001)
    pid, begin, end = json.loads(begun[0].read_text(encoding="utf-8")) if begun else (0, 0, 0)
    while not build.done():
        states: Counter[str] = Counter()
        try:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                call, *said = (thread / "syscall").read_text(encoding="utf-8").split()
                locked = call in IDLE and begin <= int(said[0], 16) < end
                waiting = CAUSES[0] if locked else CAUSES[1] if call in MEMORY else CAUSES[2]
                states["running" if call == "running" else "idle" if call in IDLE and not locked else waiting] += 1
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread that has just ended
        free = 2
        for state in ("running", *CAUSES):
            taken = min(free, states[state])
            found[state], free = found[state] + taken, free - taken
        found["nothing to do"] += free
        time.sleep(0.01)
    build.result()  # what made it fail is raised here
    return {state: count / max(1, found.total()) for state, count in found.items()}


@numba.njit(nogil=True)
def _calculate(times: int) -> int:
    state = 1
    for _ in range(times):
        state ^= (state << 13) & 0x7FFFFFFF
        state ^= state >> 7
    return state


@numba.njit(nogil=True)
def _touch(room: np.ndarray) -> None:
    for at in range(0, room.size, 4096):
        room[at] = 1


def limits() -> None:
    """Print as JSON how much one thread and two do in a second: calculations, bytes copied, new pages."""
    size = 200_000_000
    pairs = [(np.ones(size // 8), np.ones(size // 8)) for _ in range(2)]

    def pages(_number: int) -> None:
        with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
            room.madvise(mmap.MADV_NOHUGEPAGE)
            _touch(np.frombuffer(room, dtype=np.uint8))

    works: dict[str, tuple[float, Callable[[int], object]]] = {
        "calculating, 1e9 steps/s": (0.2, lambda _number: _calculate(200_000_000)),
        "copying memory, GB/s": (size / 1e9, lambda number: np.copyto(*pairs[number])),
        "taking new pages, 1e6/s": (size / 4096 / 1e6, pages),
    }
    _calculate(1), _touch(np.ones(1, dtype=np.uint8))
    told = {}
    for name, (amount, work) in works.items():
        for threads in (1, 2):
            took = []
            with ThreadPoolExecutor(threads) as pool:
                for _ in range(5):
                    begin = time.perf_counter()
                    list(pool.map(work, range(threads)))
                    took.append(time.perf_counter() - begin)
            told[f"{name} {threads}"] = threads * amount / min(took)
    print(json.dumps(told))


def main() -> None:
    """Simulate, measure, check, print the tables and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="128 GPUs, once")
    parser.add_argument("--gpus", type=int, default=2_000)
    parser.add_argument("--times", type=int, default=3, help="how often each way is taken")
    parser.add_argument("--work", type=Path, help="where the files go, and stay; default: a folder that disappears")
    for name in ("build", "out", "small", "core", "together"):
        parser.add_argument(f"--{name}", type=int if name in ("core", "together") else Path, help=argparse.SUPPRESS)
    parser.add_argument("--limits", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.limits:
        return limits()
    if args.build:
        return build(args.build, args.out, args.small, args.core, args.together)
    gpus, times = (128, 1) if args.quick else (args.gpus, args.times)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        folder = args.work or Path(name)
        small, large = folder / "32-gpus-40-days", folder / f"{gpus}-gpus-{DAYS}-days"
        for place, fleet, days in ((small, 32, 40), (large, gpus, DAYS)):
            if not (place / "dataset.json").exists():
                simulate(place, gpus=fleet, days=days, seed=7, scenario="base")

        def built(out: str, *cores: int | None) -> list[Future[dict[str, float]]]:
            shutil.rmtree(folder / "started", ignore_errors=True)
            (folder / "started").mkdir()
            options = ["--build", large, "--small", small, "--together", len(cores)]
            found = []
            for number, core in enumerate(cores):
                place = folder / f"{out}-{number}"
                shutil.rmtree(place, ignore_errors=True)  # or nothing would be built, or a killed build gone on with
                place.mkdir()
                own = ["--out", place / "matrix", *([] if core is None else ["--core", core])]
                found.append(pool.submit(told_by, __file__, *options, *own))
            return found

        took: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(times):
            for way, cores in WAYS.items():
                each = [one.result() for one in built(way.replace(" ", "-"), *cores)]
                took[way].append({what: sum(one[what] for one in each) / len(each) for what in each[0]})
                took[way][-1]["wall"] = max(one["wall"] for one in each)
        if not equal(folder / "one-thread-0" / "matrix", folder / "two-threads-0" / "matrix"):
            sys.exit("two threads do not give the matrix that one gives: nothing is told")
        free = waits(folder / "started", built("watched", None)[0])
        samples = Dataset.open(large).meta.counts["samples"]
    cost = {way: sorted(runs, key=lambda one: one["wall"])[times // 2] for way, runs in took.items()}
    print(f"{samples:,} simulated samples of {gpus:,} GPUs")
    tell(cost, free, told_by(__file__, "--limits"))


def tell(cost: dict[str, dict[str, float]], free: dict[str, float], limit: dict[str, float]) -> None:
    """Print the tables and the line of JSON."""
    one, two = cost["one thread"], cost["two threads"]
    print(f"\n{'':<16}{''.join(f'{what:>12}' for what in SPENT)}{'cores':>8}{'gain':>8}")
    gain = {}
    for way, spending in cost.items():
        builds = len(WAYS[way])
        gain[way] = builds * one["wall"] / spending["wall"]
        cores = builds * (spending["user"] + spending["system"]) / spending["wall"]
        figures = "".join(f"{spending[what]:>12,.{0 if what in COUNTS else 2}f}" for what in SPENT)
        print(f"{way:<16}{figures}{cores:>8.2f}{gain[way]:>8.2f}")
    print("two processes: the wall seconds of the later one, of the rest the mean of both; together two builds\n")
    for phase in PHASES:
        walls = f"{one[phase]:.2f} s by one thread and {two[phase]:.2f} s by two"
        cpus = f"{one[f'{phase} cpu']:.2f} and {two[f'{phase} cpu']:.2f} s of CPU"
        print(f"- {phase}: {walls}, {cpus}; two end {two[f'{phase} tail']:.2f} s apart")
    shares = ", ".join(f"{state} {free.get(state, 0.0):.1%}" for state in ("running", *CAUSES, "nothing to do"))
    print(f"the time of both cores in a build by two threads, by what a free one's threads wait for: {shares}")
    print(f"\n{'limits of the machine':<28}{'1 thread':>10}{'2 threads':>11}{'gain':>7}")
    for name in sorted({name[:-2] for name in limit}):
        alone, both = limit[f"{name} 1"], limit[f"{name} 2"]
        print(f"{name:<28}{alone:>10.2f}{both:>11.2f}{both / alone:>7.2f}")
    print(f"load of the machine {os.getloadavg()[0]:.1f}")
    line = {
        "name": "second_core",
        "value": round(gain["two threads"], 2),
        "unit": "times as fast by two threads",
        "peer": "two processes",
        "ratio": round(gain["two threads"] / gain["two processes"], 2),
        "limit_share": round(gain["two threads"] / 2, 2),
        "checked": True,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
