"""The whole loop on a real Slurm, with the units that are installed there: a simulated week in minutes.

Prometheus and Slurm are real, and each command of a unit is a process of its own, in turn killed at a random moment and
run again. The fleet's telemetry and tickets are simulated; the clock is shifted for our processes alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml

from features.matrix.matrix import FeatureMatrix
from simulator.simulate import simulate
from telemetry.dataset.store import Dataset
from tests.processes import ROOT
from tests.system.prometheus_server import load_blocks, need_prometheus, prometheus
from tests.system.simulated_exposition import same_values, samples_of, write_openmetrics
from tests.system.slurm_cluster import SlurmCluster, why_not
from tests.waiting import wait

pytestmark = [pytest.mark.system, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]
SEED, SICK, ADMINS = 198, "node-00005", "node-00002"
FIRST = datetime(2030, 6, 3, tzinfo=UTC)
HISTORY, WEEK, DAY, LATE = timedelta(days=38), timedelta(days=7), timedelta(days=1), timedelta(minutes=70)
WHAT = ("timestamp", "gpu", "type", "code")
PARAMS = """
telemetry: {step: 30m}
decision: {every: 24h}
models:
  profile: lightgbm
  learners: [lightgbm]
  parallel: {members: [lightgbm], combiner: mean_log_odds}
  cascade: {stages: [lightgbm]}
  horizons: []
  settings: {lightgbm: {n_estimators: 60}}
features: {groups: [telemetry, history, onset], windows: [1h], history_windows: [7d]}
training: {candidate_windows: [14d, 28d], augmentation: 2}
"""
POLICY = """
thresholds: {watch: 0.03, elevated: 0.1, high: 0.4}
hysteresis: {rise_after: 1, fall_after: 2}
stages: {pinned: {slurm/gpu: hard}}
budget: {disruption_budgets: [{scope: fleet, max_unavailable_share: 0.5}], rate_limits: []}
breaker: {max_risky: 1.0, jump: 100.0}
cost_benefit: {always: true, may_wait: false}
"""
# The fleet fails sixty times as often as a real one, so the breaker has to bear more nodes at risk.
SHIFTED = """\
import time_machine
time_machine.travel({now}).start()
from predrain.command import main
main()
"""
DIAGNOSE = """\
import datetime, json, pathlib, sys
asked, here = json.load(sys.stdin), pathlib.Path(sys.argv[1])
if asked["step"] != "result":
    sys.exit()
broken = asked["node"] in (here / "broken").read_text().split()
shift = datetime.timedelta(seconds=int((here / "shift").read_text()))
now = (datetime.datetime.now(datetime.timezone.utc) + shift).isoformat()
print(json.dumps({"state": "failed" if broken else "passed", "node": asked["node"], "key": asked["key"], "at": now}))
"""
TRAINING = """\
acknowledge() {{ scontrol update JobId=$SLURM_JOB_ID \
"Comment=predrain.checkpoint=B:USR1@30 predrain.checkpointed=$(($(date +%s) + $(cat {shift})))"; }}
trap acknowledge USR1
echo "$SLURM_JOB_NODELIST" >> {log}
while true; do sleep 0.2; done
"""


class Host:
    """The host that runs Slurm's commands, with predrain installed, at a time that the test sets.

    ``doomed``: the verbs that are killed once, the next time.
    ``kills``: how many were.
    """

    def __init__(self, root: Path, cluster: SlurmCluster) -> None:
        self.root, self.cluster, self.random = root, cluster, random.Random(SEED)
        self.now, self.doomed, self.kills = datetime.now(UTC), set[str](), 0
        self._took = dict[str, float]()
        command = ["sh", ROOT / "deploy" / "slurm" / "install.sh", "--root", root]
        subprocess.run(command, capture_output=True, check=True, timeout=60)
        self.settings, self.act = (root / "etc" / "predrain" / name for name in ("predrain.env", "act.yaml"))
        for file in (self.settings, self.act):
            file.write_text(file.read_text().replace("/var/lib", f"{root}/var/lib"))
        self.state = root / "var" / "lib" / "predrain"
        (self.state / "slurm").mkdir(parents=True)
        self.fleet, self._calls = self.state / "fleet", root / "calls"
        programs = root / "programs"
        programs.mkdir()
        (programs / "scontrol").write_text(
            f'#!/bin/sh\necho "$*" >>{self._calls}\nexec {shutil.which("scontrol")} "$@"\n'
        )
        (programs / "scontrol").chmod(0o755)
        self._environment = cluster.environment | {"PATH": f"{programs}:{cluster.environment['PATH']}"}

    def set(self, **settings: str) -> None:
        """Change lines of the one file of settings."""
        text = self.settings.read_text()
        for name, value in settings.items():
            text = re.sub(rf"^{name}=.*$", f"{name}={value}", text, flags=re.M)
        self.settings.write_text(text)

    def unit(self, name: str, *more: str) -> str:
        """Run the command of a unit, to its end where it would go on; give what it prints."""
        text = (self.root / "etc" / "systemd" / "system" / f"predrain-{name}.service").read_text()
        variables = dict(re.findall(r"^Environment=(\w+)=(.*)$", text, flags=re.M))
        variables |= dict(re.findall(r"^(\w+)=(.*)$", self.settings.read_text(), flags=re.M))
        variables = {key: value.replace("%C", str(self.root / "cache")) for key, value in variables.items()}
        (line,) = re.findall(r"^ExecStart=/usr/bin/env predrain (.*)$", text, flags=re.M)
        line = re.sub(r"--listen \S+|--loop", "", line).replace("/etc/predrain", f"{self.root}/etc/predrain")
        words = shlex.split(re.sub(r"\$\{?(\w+)\}?", lambda found: variables[found[1]], line))
        return self.predrain(*words, *more, **variables)

    def predrain(self, *words: object, **variables: str) -> str:
        """Run a predrain command to success, after a kill where its verb is doomed; return what it prints."""
        verb = " ".join(map(str, words[: 2 if words[0] == "collect" else 1]))
        if verb in self.doomed:
            self.doomed.discard(verb)
            with self._started(words, variables) as process, contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=self.random.uniform(0.2, 0.9) * min(self._took[verb], 10.0))
            self.kills += process.returncode == -signal.SIGKILL
        began = time.monotonic()
        with self._started(words, variables) as process:
            out, errors = process.communicate(timeout=600)
        self._took[verb] = time.monotonic() - began
        assert process.returncode == 0, (words, self.now, out, errors)
        return out

    @contextlib.contextmanager
    def _started(self, words: tuple[object, ...], variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
        (self.root / "shift").write_text(str(int((self.now - datetime.now(UTC)).total_seconds())))
        process = subprocess.Popen(
            [sys.executable, "-c", SHIFTED.format(now=self.now.timestamp()), *map(str, words)],
            env=self._environment | variables, cwd=self.state, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)

    def round(self) -> None:
        """A round of the controller, a minute after the one before; it waits for the lease of one that was killed."""
        wait(lambda: "standby" not in self.unit("act"))
        self.now += timedelta(minutes=1)

    def drains(self, node: str) -> int:
        """Count the calls that took a node out of service."""
        calls = self._calls.read_text().lower().splitlines()
        return sum(node in call and "state=drain" in call for call in calls)


class World:
    """The fleet on its cluster, with a job on the node that will fail, and people who write tickets."""

    def __init__(self, root: Path, events: pd.DataFrame, url: str, cluster: SlurmCluster) -> None:
        self.root, self.events, self.url, self.cluster = root, events, url, cluster
        self.since, self.until = FIRST - HISTORY, FIRST
        self.host = host = Host(root, cluster)
        (root / "params.yaml").write_text(PARAMS)
        (root / "diagnose.py").write_text(DIAGNOSE)
        (root / "broken").write_text("")
        host.set(PREDRAIN_SLURM_OPTIONS="--once", PREDRAIN_PARAMS=f"--params {root}/params.yaml")
        settings = yaml.safe_load(host.act.read_text())
        settings["policy"] = yaml.safe_load(POLICY)
        settings["slurm"]["slurm_conf"] = str(cluster.root / "slurm.conf")
        settings["controller"]["lease"] = "2s"
        argv = [sys.executable, "-SE", str(root / "diagnose.py"), str(root)]
        settings["evacuation"] = {"enabled": True, "verification": {"method": "command", "command": {"argv": argv}}}
        host.act.write_text(yaml.safe_dump(settings))

        cluster.update(ADMINS, state="drain", reason="ADMIN", extra='{"theirs": [1, {"b": 2}]}')
        for node in cluster.nodes:  # so that the job begins on the sick node, and may go elsewhere
            cluster.update(node, weight="1" if node == SICK else "50")
        self.untouched = {node: cluster.node(node) for node in cluster.nodes}
        script = TRAINING.format(shift=root / "shift", log=root / "job.log")
        options = ("--gres=gpu:2", "-c1", "--requeue", "--comment=predrain.checkpoint=B:USR1@30")
        self.job = cluster.submit(*options, script=script)
        cluster.wait(lambda: (root / "job.log").exists() and self.where() == SICK)

    def where(self) -> str:
        """Where the job runs; Slurm itself would start one that was requeued after two minutes."""
        if self.cluster.job(self.job)["job_state"] == "PENDING":
            self.cluster.run("scontrol", "update", f"jobid={self.job}", "starttime=now")
        job = self.cluster.job(self.job)
        return str(job["nodes"]) if job["job_state"] == "RUNNING" else ""

    def collect(self, now: datetime) -> None:
        """Let a time come, with the telemetry, tickets and nodes' states of it."""
        self.host.now, self.until = now, now - timedelta(minutes=3)
        since, until = (f"{at:%Y-%m-%dT%H:%M:%SZ}" for at in (self.since, self.until))
        span = ("--since", since, "--until", until, "--params", self.root / "params.yaml")
        self.host.predrain("collect", "prometheus", "--prometheus", self.url, *span, "--dataset", self.host.fleet)
        self.since = self.until - DAY
        self.events[self.events["known_at"] <= now].to_csv(self.root / "tickets.csv", index=False)
        self.host.predrain("collect", "tickets", self.root / "tickets.csv", "--dataset", self.host.fleet)
        self.host.unit("slurm")
        self.host.unit("compact")

    def drained(self) -> bool:
        """Whether the sick node is out of service."""
        return "drain" in self.cluster.states()[SICK]


def occurred(events: pd.DataFrame) -> list[tuple[object, ...]]:
    """Give events in an order, each as often as it is there."""
    events = events.assign(timestamp=events["timestamp"].astype("datetime64[ms, UTC]"))
    return sorted(zip(*(events[name].astype(object).fillna("").map(str) for name in WHAT), strict=True))


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder whose name is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="wl", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def test_a_week_on_slurm_from_installation_to_a_model_that_learned_from_the_failure_it_foresaw(root: Path) -> None:
    need_prometheus()
    simulate(
        root / "fleet", gpus=48, days=(HISTORY + WEEK) // DAY, seed=SEED, scenario="announced", acceleration=60.0,
        step=timedelta(minutes=30), start=FIRST - HISTORY,
    )  # fmt: skip
    truth = Dataset.open(root / "fleet")
    failures = pq.read_table(root / "fleet-truth" / "failures.parquet").to_pylist()
    (failure,) = (failure for failure in failures if failure["start"] > FIRST)
    assert failure["node"] == SICK
    write_openmetrics(truth, root / "history.om")
    load_blocks(root / "history.om", root / "data")
    nodes = sorted(truth.inventory()["node"].unique())
    with prometheus(root / "data") as url, SlurmCluster(root / "s", nodes=nodes) as cluster:
        world = World(root, truth.events(), url, cluster)
        host = world.host
        world.collect(FIRST + LATE)
        assert json.loads(host.unit("retrain", "--json"))["action"] == "promoted"
        drained_at = emptied_at = released_at = None
        turns = iter(("collect prometheus", "collect tickets", "collect slurm", "collect compact", "score", "act"))
        for day in range(WEEK // DAY):
            world.collect(FIRST + day * DAY + LATE)
            (root / "broken").write_text(SICK if failure["degraded_at"] < host.now < failure["repaired"] else "")
            host.unit("score")
            for _ in range(4):
                host.round()
            if drained_at is None and world.drained():
                drained_at = host.now

                def moved() -> bool:
                    host.doomed = {"act"}
                    host.round()
                    return world.where() not in ("", SICK)

                wait(moved)
                emptied_at = host.now
                assert "predrain.checkpointed=" in cluster.job(world.job)["comment"]
            if drained_at and not released_at and not world.drained():
                released_at = host.now
            host.doomed = set(itertools.islice(turns, 1))
        assert failure["degraded_at"] < drained_at < emptied_at < failure["start"]
        assert failure["repaired"] < released_at, "its diagnostic failed until then"
        assert (root / "job.log").read_text().split() == [SICK, world.where()]
        assert host.drains(SICK) == 1
        assert max(map(host.drains, nodes)) == 1

        world.collect(FIRST + WEEK)
        host.doomed = {"retrain"}
        champion = json.loads(host.unit("retrain", "--json"))
        assert (champion["champion"], champion["done"]) == (2, True)
        matrix = FeatureMatrix.open(host.state / "fleet-matrix")
        rows = matrix.rows.assign(label=matrix.labels()["label"])
        assert failure["gpu"] in set(rows["gpu"][(rows["label"] == 1) & (rows["decision_time"] > FIRST)])
        host.now += 3 * DAY
        host.round()
        cluster.run("scancel", world.job)
        cluster.wait(lambda: {node: cluster.node(node) for node in nodes} == world.untouched)  # what expired is off
        assert host.kills >= WEEK // DAY

        held = Dataset.open(host.fleet)
        mine, theirs = samples_of(held), samples_of(truth)
        theirs = theirs[theirs["timestamp"] <= mine["timestamp"].max()].reset_index(drop=True)
        assert all(same_values(mine[name], theirs[name]) for name in mine)
        assert theirs[theirs.columns.difference(mine.columns)].isna().all(axis=None)
        waiting = pd.read_parquet(host.fleet / "compaction" / "pending.parquet")  # of GPUs that were not seen by then
        ours = held.events()
        ours = ours[~ours["source"].isin(["slurm", "predrain"])]
        known = world.events[world.events["known_at"] <= FIRST + WEEK]
        assert occurred(pd.concat([ours, waiting])) == occurred(known)
