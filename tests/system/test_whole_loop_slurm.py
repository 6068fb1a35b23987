"""The whole loop on a real Slurm, with the units that are installed there."""

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.processes import ROOT
from tests.system.prometheus_server import prometheus
from tests.system.slurm_cluster import RELEASES, SlurmCluster, programs_of, why_not
from tests.system.whole_loop import ADMINS, PARAMS, POLICY, RETRY_AFTER, SICK, SINCE, Fleet, Loop, simulated
from tests.waiting import wait

pytestmark = [pytest.mark.system, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]
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


class SlurmLoop(Loop):
    """The host that runs Slurm's commands."""

    scheduler = "slurm"

    def __init__(self, root: Path, fleet: Fleet, url: str, cluster: SlurmCluster) -> None:
        programs, self._calls = root / "programs", root / "calls"
        environment = cluster.environment | {"PATH": f"{programs}:{cluster.environment['PATH']}"}
        super().__init__(root, fleet, root / "var" / "lib" / "predrain", environment)
        self.cluster, self.url = cluster, url
        command = ["sh", ROOT / "deploy" / "slurm" / "install.sh", "--root", root]
        subprocess.run(command, capture_output=True, check=True, timeout=60)
        (self.state / "slurm").mkdir(parents=True)
        programs.mkdir()
        scontrol = programs / "scontrol"
        real = shutil.which("scontrol", path=cluster.environment["PATH"])
        scontrol.write_text(f'#!/bin/sh\necho "$*" >>{self._calls}\nexec {real} "$@"\n')
        scontrol.chmod(0o755)
        (root / "params.yaml").write_text(PARAMS)
        (root / "diagnose.py").write_text(DIAGNOSE)
        self._settle()

        cluster.update(ADMINS, state="drain", reason="ADMIN", extra='{"theirs": [1, {"b": 2}]}')
        for node in cluster.nodes:  # so that the job begins on the sick node, and may go elsewhere
            cluster.update(node, weight="1" if node == SICK else "50")
        self._before = self._nodes()
        script = TRAINING.format(shift=root / "shift", log=root / "job.log")
        options = ("--gres=gpu:2", "-c1", "--requeue", "--comment=predrain.checkpoint=B:USR1@30")
        self.job = cluster.submit(*options, script=script)
        cluster.wait(lambda: (root / "job.log").exists() and self.where() == SICK)

    def _settle(self) -> None:
        """Change the settings as a site does."""
        env, act = (self.root / "etc" / "predrain" / name for name in ("predrain.env", "act.yaml"))
        texts = [file.read_text().replace("/var/lib", f"{self.root}/var/lib") for file in (env, act)]
        own = {"PREDRAIN_SLURM_OPTIONS": "--once", "PREDRAIN_PARAMS": f"--params {self.root}/params.yaml"}
        env.write_text(
            re.sub(r"^(\w+)=(.*)$", lambda line: f"{line[1]}={own.get(line[1], line[2])}", texts[0], flags=re.M)
        )
        settings = yaml.safe_load(texts[1])
        settings["policy"] = yaml.safe_load(POLICY.replace("GROUP", "slurm/gpu"))
        settings["slurm"]["slurm_conf"] = str(self.cluster.root / "slurm.conf")
        settings["controller"]["lease"] = "2s"
        argv = [sys.executable, "-SE", str(self.root / "diagnose.py"), str(self.root)]
        verification = {"method": "command", "command": {"argv": argv}, "retry_after": RETRY_AFTER}
        settings["evacuation"] = {"enabled": True, "verification": verification}
        act.write_text(yaml.safe_dump(settings))

    def installed(self, name: str) -> tuple[list[str], dict[str, str]]:
        """Give the command of a unit, to its end where it would go on; no unit fetches from Prometheus."""
        if name == "prometheus":
            words = ["collect", "prometheus", f"--prometheus={self.url}", f"--since={SINCE}", "--until=2m"]
            return [*words, f"--dataset={self.state}/fleet", f"--params={self.root}/params.yaml"], {}
        etc = self.root / "etc"
        text = (etc / "systemd" / "system" / f"predrain-{name}.service").read_text()
        variables = dict(re.findall(r"^Environment=(\w+)=(.*)$", text, flags=re.M))
        variables |= dict(re.findall(r"^(\w+)=(.*)$", (etc / "predrain" / "predrain.env").read_text(), flags=re.M))
        variables = {key: value.replace("%C", str(self.root / "cache")) for key, value in variables.items()}
        (line,) = re.findall(r"^ExecStart=/usr/bin/env predrain (.*)$", text, flags=re.M)
        line = re.sub(r"--listen \S+|--loop", "", line).replace("/etc/predrain", f"{etc}/predrain")
        return shlex.split(re.sub(r"\$\{?(\w+)\}?", lambda found: variables[found[1]], line)), variables

    def where(self) -> str:
        """Where the job runs; Slurm itself would start one that was requeued after two minutes."""
        if self.cluster.job(self.job)["job_state"] == "PENDING":
            self.cluster.run("scontrol", "update", f"jobid={self.job}", "starttime=now")
        job = self.cluster.job(self.job)
        return str(job["nodes"]) if job["job_state"] == "RUNNING" else ""

    def out(self) -> frozenset[str]:
        """Name the nodes that are drained, but for the administrator's."""
        states = wait(self.cluster.states)
        return frozenset(name for name, state in states.items() if "drain" in state and name != ADMINS)

    def checkpoint(self) -> None:
        """Leave it to the job, which acknowledges at once."""

    def moved(self) -> bool:
        """Whether the job runs elsewhere, after its checkpoint."""
        if self.where() in ("", SICK):
            return False
        assert "predrain.checkpointed=" in self.cluster.job(self.job)["comment"]
        return True

    def untouched(self) -> bool:
        """Whether each node stands as it did, once the job has ended."""
        self.cluster.run("scancel", self.job)
        return self._nodes() == self._before

    def _nodes(self) -> dict[str, list[str]]:
        return {node: self.cluster.node(node) for node in self.cluster.nodes}

    def drain_calls(self, node: str) -> int:
        """Count the calls that took a node out of service."""
        calls = self._calls.read_text().lower().splitlines()
        return sum(node in call and "state=drain" in call for call in calls)


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder whose name is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="wl", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.parametrize("release", RELEASES)
def test_a_week_on_slurm_from_installation_to_a_model_that_learned_from_the_failure_it_foresaw(
    root: Path, release: str
) -> None:
    programs = programs_of(release) or Path()
    fleet = simulated(root)
    with (
        prometheus(root / "data", program=programs / "prometheus") as url,
        SlurmCluster(root / "s", release, nodes=fleet.nodes) as cluster,
        contextlib.closing(SlurmLoop(root, fleet, url, cluster)) as loop,
    ):
        loop.week()
        began = (root / "job.log").read_text().split()
        assert began[0] == SICK not in began[1:]
        assert len(began) == 2
        assert max(map(loop.drain_calls, fleet.nodes)) == loop.drain_calls(SICK) == 1
