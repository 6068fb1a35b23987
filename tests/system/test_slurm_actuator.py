"""The controller on a real Slurm: marks, jobs that move, people who come between, restarts of its controller."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from policy.fleet import Level
from policy.plan import Action
from scheduler.ports.clock import SystemClock
from scheduler.ports.errors import SchedulerError
from scheduler.ports.readings import Precondition, WriteResult
from scheduler.ports.workloads import CheckpointAsk, Fence, Workload
from scheduler.slurm.marks import SET_AT, slurm_marks_on
from scheduler.slurm.node import SlurmNode
from scheduler.slurm.scheduler import SlurmScheduler, open_slurm
from scheduler.slurm.settings import SlurmSettings
from scheduler.slurm.workloads import SlurmWorkloads
from tests.scheduler.score_files import record, write
from tests.serving.http.world import NOW, running
from tests.serving.http.world import record as scored
from tests.serving.score_folder import write_scores
from tests.system.slurm_cluster import RELEASES, SlurmCluster, _path, cluster_of, why_not
from tests.waiting import free_port, listens

pytestmark = [pytest.mark.system, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]
ROOT = Path(__file__).parents[2]
PREDRAIN = str(Path(sys.executable).with_name("predrain"))
ME = "system test"
HOUR = timedelta(hours=1)
TRAINING = """\
acknowledge() {{ echo asked >> {log}; scontrol update JobId=$SLURM_JOB_ID \
"Comment=predrain.checkpoint=B:USR1@30 predrain.checkpointed=$(date +%s)"; }}
trap acknowledge USR1
echo "start on $SLURM_JOB_NODELIST" >> {log}
while true; do sleep 0.2; done
"""


@pytest.fixture(scope="module", params=RELEASES)
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    """Three nodes of eight GPUs."""
    with cluster_of(request.param, nodes=3) as made:
        yield made


class Actuator:
    """A process of ours over the cluster."""

    def __init__(self, cluster: SlurmCluster, folder: Path, **settings: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.cluster, self.clock = cluster, SystemClock()
        self.settings = SlurmSettings(str(folder), cluster="c", **cluster.settings, **settings)
        self.scheduler: SlurmScheduler = open_slurm(self.settings, self.clock)
        self.workloads = SlurmWorkloads(self.scheduler.port, self.scheduler.folder, self.clock)

    def node(self, name: str) -> SlurmNode:
        listed = self.scheduler.port.node(name)
        assert listed is not None
        return listed

    def level(self, name: str) -> Level:
        return slurm_marks_on(self.node(name), self.settings, self.clock.now()).marks.level

    def fence(self) -> Fence:
        until = self.scheduler.hold_lease(ME, timedelta(minutes=5))
        assert until is not None
        return Fence(ME, until)

    def apply(self, action: Action) -> WriteResult:
        for _ in range(3):  # a boot time that Slurm learns between two readings is another node
            reading = self.scheduler.revalidate(action.node)
            assert reading is not None
            fence = self.fence()
            answer = self.scheduler.apply(
                action, Precondition(reading.version, reading.boot_id, fence.holder, fence.until)
            )
            if answer.kind != "conflict":
                break
        return answer

    def job(self, node: str, number: str) -> Workload:
        return next(workload for workload in self.workloads.on_node(node) if workload.name == number)


@pytest.fixture
def actuator(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Actuator]:
    made = Actuator(cluster, tmp_path / "shared")
    yield made
    cluster.run("scancel", "--full", "--user=root", check=False)
    for name in cluster.nodes:
        cluster.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)
        cluster.update(name, extra="", weight="1")
    cluster.wait(lambda: set(cluster.states().values()) == {"idle"})  # also: each answers a ping again


def an(verb: str, node: str, duration: timedelta = HOUR) -> Action:
    level = {"publish": 1, "avoid": 2, "swap": 3, "drain": 4, "release": 0}[verb]
    end = None if verb == "release" else datetime.now(UTC) + duration
    return Action(verb, node, "high", Level(level), 0.83, end, ("its errors rise",))


ACT = """\
policy:
  thresholds: {{watch: 0.1, elevated: 0.3, high: 0.6}}
  hysteresis: {{rise_after: 1}}
  stages: {{pinned: {{c/gpu: hard}}}}
  budget: {{disruption_budgets: [], rate_limits: []}}
  breaker: {{max_risky: 1.0, jump: 100.0}}
  cost_benefit: {{always: true}}
controller: {{interval: 1s}}
evacuation:
  enabled: true
  verification: {{method: command, command: {{argv: ["{python}", "-SE", "{diagnose}"]}}}}
slurm: {{folder: "{folder}", cluster: c}}
"""
DIAGNOSE = """\
import datetime, json, sys
asked = json.load(sys.stdin)
now = datetime.datetime.now(datetime.timezone.utc).isoformat()
print(json.dumps({"state": "passed", "node": asked["node"], "key": asked["key"], "at": now}))
"""


def test_the_command_empties_a_node_before_it_fails_and_gives_it_back_after_a_diagnostic(cluster, actuator, tmp_path):
    log, diagnose, act = tmp_path / "job.log", tmp_path / "diagnose.py", tmp_path / "act.yaml"
    for other in ("n2", "n3"):
        cluster.update(other, weight="50")  # so that the job begins on n1, and may go elsewhere
    cluster.update("n1", extra='{"theirs": [1, {"b": 2}]}')
    before = actuator.node("n1").extra
    job = cluster.submit(
        "--gres=gpu:2", "-c1", "--requeue", "--comment=predrain.checkpoint=B:USR1@30", script=TRAINING.format(log=log)
    )
    cluster.wait(lambda: cluster.job(job)["job_state"] == "RUNNING" and log.exists())
    assert cluster.job(job)["nodes"] == "n1"
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    records = [record(f"gpu-{name}", name, 0.95 if name == "n1" else 0.01, now) for name in cluster.nodes]
    write(tmp_path / "scores", *records, at=now, model={"fitted_at": (now - timedelta(days=1)).isoformat()})
    diagnose.write_text(DIAGNOSE)
    act.write_text(ACT.format(python=sys.executable, diagnose=diagnose, folder=actuator.scheduler.folder.path))
    command = (
        PREDRAIN, "act", "--scheduler", "slurm", "--settings", str(act), "--scores", str(tmp_path / "scores"),
        "--ledger", str(tmp_path / "ledger.db"),
    )  # fmt: skip
    rehearsed = subprocess.run(
        [*command, "--dry-run"], env=cluster.environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert "node n1: State: (none) -> DRAIN" in rehearsed.stdout
    assert actuator.node("n1").out == frozenset()

    process = subprocess.Popen(
        [*command, "--loop"], env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        cluster.wait(lambda: cluster.job(job)["job_state"] == "PENDING")
        cluster.run("scontrol", "update", f"jobid={job}", "starttime=now")  # Slurm itself waits two minutes
        cluster.wait(lambda: cluster.job(job)["job_state"] == "RUNNING")
        cluster.wait(lambda: actuator.node("n1").out == frozenset())
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, (out, err)
    assert log.read_text().splitlines() == ["start on n1", "asked", f"start on {cluster.job(job)['nodes']}"]
    assert cluster.job(job)["nodes"] != "n1"
    node = actuator.node("n1")
    assert (node.reason, node.weight, node.extra) == (None, 1, before)
    why = subprocess.run(
        [PREDRAIN, "ledger", "why", "n1", "--ledger", str(tmp_path / "ledger.db")],
        capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip
    assert "verified: passed" in why
    assert "its drain marker is gone" in why


def test_a_restart_of_slurmctld_keeps_the_drain_and_the_weight_is_set_again_and_given_back(cluster, actuator):
    cluster.update("n2", weight="1")
    for verb in ("publish", "avoid"):
        assert actuator.apply(an(verb, "n2")).kind == "done"
    for verb in ("publish", "avoid", "swap", "drain"):
        assert actuator.apply(an(verb, "n1")).kind == "done"
    reason = actuator.node("n1").reason
    cluster.wait_until_saved()
    cluster.kill("slurmctld")
    with pytest.raises(SchedulerError):
        Actuator(cluster, actuator.scheduler.folder.path, timeout=timedelta(seconds=1)).scheduler.read_fleet()
    cluster.start_controller()
    cluster.wait(lambda: len(cluster.states()) == len(cluster.nodes))

    again = Actuator(cluster, actuator.scheduler.folder.path)
    assert again.apply(an("release", "n1")).kind == "conflict"  # no state is known before the nodes have registered
    cluster.wait(lambda: all(node.readable for node in again.scheduler.port.nodes()))
    assert (again.level("n1"), again.node("n1").reason) == (Level.DRAIN, reason)
    assert again.node("n2").weight == 1  # that of slurm.conf
    fleet = {node.view.name: node.view for node in again.scheduler.read_fleet().nodes}
    assert (fleet["n2"].marks.soft, fleet["n2"].marker_removed) == (True, False)

    def weights_again() -> bool:
        again.scheduler.read_fleet()  # upkeep works on what was read, and nodes come back one by one
        fence = again.fence()
        again.scheduler.upkeep(fence.holder, fence.until)
        return [again.node(name).weight for name in ("n1", "n2")] == [1_000_001] * 2

    cluster.wait(weights_again)
    cluster.run("scontrol", "reconfigure")
    assert again.node("n2").weight == 1
    cluster.wait(weights_again)
    for name in ("n1", "n2"):
        assert again.apply(an("release", name)).kind == "done"
        node = again.node(name)
        assert (node.out, node.reason, node.extra, node.weight) == (frozenset(), None, "", 1)


def test_a_drain_that_somebody_edited_or_wrote_in_our_form_stays_and_a_node_that_reboots_is_left_alone(
    cluster, actuator
):
    for name in ("n1", "n3"):
        assert actuator.apply(an("drain", name)).kind == "done"
    ours = actuator.node("n1")
    assert SET_AT in slurm_marks_on(ours, actuator.settings, actuator.clock.now()).record.marks, (
        "Slurm told when it was drained"
    )
    appended = f"{ours.reason} - RMA 4711 opened, keep out"
    cluster.update("n1", reason=f'"{appended}"')
    cluster.update("n2", state="drain", reason=f'"{ours.reason}"')
    for _ in range(3):
        for name in ("n1", "n2"):
            actuator.apply(an("release", name))
        assert [actuator.node(name).reason for name in ("n1", "n2")] == [appended, ours.reason]
        assert [actuator.node(name).out for name in ("n1", "n2")] == [{"DRAIN"}, {"DRAIN"}]
    assert actuator.node("n1").extra == ""
    fleet = {node.view.name: node.view for node in actuator.scheduler.read_fleet().nodes}
    assert all("looks like predrain's" in (fleet[name].notice or "") for name in ("n1", "n2"))

    cluster.run("scontrol", "reboot", "nextstate=resume", "n3")
    cluster.wait(lambda: "REBOOT_ISSUED" in actuator.node("n3").states)
    rebooting = actuator.node("n3")
    assert (rebooting.reason or "").endswith(": reboot issued")
    assert actuator.apply(an("release", "n3")).kind == "already"
    assert actuator.node("n3").extra == rebooting.extra
    assert {"DRAIN", "REBOOT_ISSUED"} <= actuator.node("n3").states
    view = actuator.scheduler.revalidate("n3").view
    assert (view.down, view.counted, view.unwritable is not None) == (False, False, True)
    cluster.kill("n3")
    cluster.start_node("n3", "-b")
    cluster.wait(lambda: not actuator.node("n3").relied_on and actuator.node("n3").readable)
    assert actuator.apply(an("release", "n3")).kind == "done"
    assert (actuator.node("n3").extra, actuator.node("n3").out) == ("", frozenset())


def test_fail_stands_and_is_given_back_under_a_running_job(cluster, actuator, tmp_path):
    failing = Actuator(cluster, tmp_path / "other", hard_state="fail")
    job = cluster.submit("-w", "n3", "--gres=gpu:1", "-c1", script="sleep 300")
    cluster.wait(lambda: cluster.job(job)["job_state"] == "RUNNING")
    assert failing.apply(an("swap", "n3")).kind == "done"
    assert "FAIL" in failing.node("n3").states
    assert failing.apply(an("release", "n3")).kind == "done"
    assert failing.node("n3").out == frozenset()
    assert failing.node("n3").reason is None
    assert cluster.job(job)["job_state"] == "RUNNING"


def test_jobs_that_may_not_be_requeued_are_waited_for_and_heterogeneous_ones_go_as_a_whole(cluster, actuator):
    kept = cluster.submit("-x", "n3", "--no-requeue", "-c1", script="sleep 300")
    het = cluster.run(
        "sbatch", "--parsable", "-o", str(cluster.root / "out-%j"), "-c1", "--gres=gpu:1", ":", "-c1", "--gres=gpu:1",
        "--wrap", "sleep 300",
    ).strip()  # fmt: skip

    def listed() -> dict[str, Workload]:
        return {item.name: item for node in cluster.nodes for item in actuator.workloads.on_node(node)}

    cluster.wait(lambda: len(listed()) == 3)
    works = listed()
    assert set(works) == {kept, f"{het}+0", f"{het}+1"}
    assert works[kept].immovable == "it cannot be requeued (--no-requeue)"
    assert works[f"{het}+0"].job is not None
    fence = actuator.fence()
    assert actuator.workloads.evict(works[kept], fence).kind == "refused"
    cluster.run("scontrol", "update", f"JobId={het}+0", "Comment=predrain.keep")
    refused = actuator.workloads.evict(works[f"{het}+1"], fence)
    assert (refused.kind, refused.message.startswith(f"component {het}+0: ")) == ("refused", True)
    cluster.run("scontrol", "update", f"JobId={het}+0", "Comment=")
    assert actuator.workloads.evict(works[f"{het}+1"], fence).kind == "done"  # its leader runs elsewhere
    cluster.wait(lambda: set(listed()) == {kept})


def test_only_the_task_that_is_meant_is_signalled_and_requeued_also_that_with_the_id_of_its_array(
    cluster, actuator, tmp_path
):
    log = tmp_path / "log"
    script = f"trap 'echo signal $SLURM_ARRAY_TASK_ID >> {log}' USR1; while true; do sleep 0.1; done"
    array = cluster.submit(
        "--array=1-3", "--gres=gpu:8", "-c8", "-N1", "--requeue", "--comment=predrain.checkpoint=B:USR1", script=script
    )

    def tasks() -> dict[str, tuple[str, Workload]]:
        return {item.name: (node, item) for node in cluster.nodes for item in actuator.workloads.on_node(node)}

    cluster.wait(lambda: len(tasks()) == 3)
    running = tasks()
    job_ids = {job.name: job.number for job in actuator.scheduler.port.jobs()}
    (last,) = (name for name, number in job_ids.items() if str(number) == array)
    _, work = running[last]
    assert work.immovable is None
    ask = CheckpointAsk("a" * 32, datetime.now(UTC) + HOUR, "high")
    time.sleep(1)  # the trap is set
    assert actuator.workloads.ask_checkpoint(work, ask, actuator.fence()).kind == "done"
    cluster.wait(log.exists)
    assert actuator.workloads.evict(work, actuator.fence()).kind == "done"
    cluster.wait(lambda: last not in tasks())
    time.sleep(1)
    assert log.read_text() == f"signal {last.partition('_')[2]}\n"
    assert {name: item.uid for name, (_, item) in tasks().items()} == {
        name: item.uid for name, (_, item) in running.items() if name != last
    }


def test_pinned_suspended_held_and_reserved_jobs_are_waited_for(cluster, actuator):
    cluster.run(
        "scontrol", "create", "reservation", "reservationname=only", "nodes=n2", "users=root", "starttime=now",
        "duration=60",
    )  # fmt: skip
    try:
        options = {
            "pinned": ("-w", "n1"), "excluded": ("-x", "n2,n3"), "suspended": ("-x", "n2"), "held": ("-x", "n2"),
            "free": ("-x", "n2"), "reserved": ("--reservation=only",),
        }  # fmt: skip
        cluster.update("n3", weight="50")
        jobs = {
            cluster.submit("--gres=gpu:1", "-c1", "--requeue", *given, script="sleep 300"): name
            for name, given in options.items()
        }
        numbers = {name: number for number, name in jobs.items()}
        cluster.wait(lambda: all(cluster.job(number)["job_state"] == "RUNNING" for number in jobs))
        cluster.run("scontrol", "suspend", numbers["suspended"])
        cluster.run("scontrol", "hold", numbers["held"])
        works = {jobs[item.name]: item for node in ("n1", "n2") for item in actuator.workloads.on_node(node)}
        why = {name: item.immovable or "" for name, item in works.items()}
        assert why["free"] == ""
        assert "it requires n1 (--nodelist)" in why["pinned"]
        assert "this node only" in why["excluded"]
        assert "reservation only" in why["reserved"]
        assert "it is suspended" in why["suspended"]
        assert "it is held" in why["held"]
        cluster.run("scontrol", "update", "partitionname=gpu", "state=down")
        closed = SlurmWorkloads(actuator.scheduler.port, actuator.scheduler.folder, actuator.clock).on_node("n1")
        assert "gpu is DOWN" in next(item.immovable or "" for item in closed if jobs[item.name] == "free")
        cluster.run("scontrol", "update", "partitionname=gpu", "state=up")
        fence = actuator.fence()
        answers = {name: actuator.workloads.evict(item, fence).kind for name, item in works.items()}
        assert answers == {name: "done" if name == "free" else "refused" for name in options}
    finally:
        cluster.run("scontrol", "update", "partitionname=gpu", "state=up")
        cluster.run("scancel", "--full", "--user=root", check=False)
        cluster.wait(lambda: not actuator.scheduler.port.jobs())
        cluster.run("scontrol", "delete", "reservationname=only", check=False)


def test_a_submit_script_keeps_a_job_off_risky_nodes_and_goes_on_without_scores(cluster, actuator, tmp_path):
    risks = {"n1": (0.9, "high"), "of-another-cluster": (0.9, "high"), "n2": (0.01, "clear"), "n3": (0.01, "clear")}
    write_scores(tmp_path / "scores", [scored(f"GPU-{name}", name, *risk) for name, risk in risks.items()])
    now, complaints = [NOW], tmp_path / "complaints"
    with running(tmp_path / "scores", clock=lambda: now[0]) as service:
        url, listed = f"http://127.0.0.1:{service.port}", ROOT / "deploy" / "slurm" / "exclude-nodes.sh"

        def node_of_a_job() -> str:
            submit = f'sbatch --parsable -o /dev/null -c8 --exclude="$({listed} 2>{complaints})" --wrap "sleep 300"'
            job = cluster.run("env", f"PREDRAIN_URL={url}", "sh", "-c", submit).strip()
            cluster.wait(lambda: cluster.job(job)["job_state"] == "RUNNING")
            nodes = cluster.job(job)["nodes"]
            cluster.run("scancel", job)
            return nodes

        assert (node_of_a_job(), complaints.read_text()) == ("n2", "")
        now[0] += timedelta(days=1)
        assert node_of_a_job() == "n1"
        assert complaints.read_text().endswith("exclude-nodes.sh: no node is excluded\n")


@pytest.mark.skipif(shutil.which("slurmrestd", path=_path()) is None, reason="slurmrestd is not installed")
@pytest.mark.parametrize("auth", ["local", "jwt"])
def test_slurmrestd_is_read_like_the_commands_and_written_to_where_its_version_can(cluster, actuator, tmp_path, auth):
    socket, port, log, token = cluster.root / "rest.sock", free_port(), tmp_path / "log", tmp_path / "token"
    script = f"trap 'echo asked >> {log}' USR1; while true; do sleep 0.1; done"
    job = cluster.submit("-w", "n1", "--gres=gpu:1", "--comment=predrain.checkpoint=B:USR1", script=script)
    cluster.update("n2", state="drain", reason="ADMIN", extra='{"a": 1}')
    cluster.wait(lambda: cluster.job(job)["job_state"] == "RUNNING")
    interface = "openapi/v0.0.38" if cluster.release == "installed" else "openapi/slurmctld"
    process = subprocess.Popen(
        ["slurmrestd", "-f", str(cluster.root / "slurm.conf"), "-s", interface, "-a", f"rest_auth/{auth}",
         f"unix:{socket}" if auth == "local" else f"127.0.0.1:{port}"],
        env={**cluster.environment, "SLURMRESTD_SECURITY": "disable_user_check"}
        | ({"SLURM_JWT": "daemon"} if auth == "jwt" else {}),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    settings = {"rest_url": f"unix:{socket}"}
    if auth == "jwt":
        settings = {"rest_url": f"http://127.0.0.1:{port}", "rest_user": "root", "rest_token_file": str(token)}
    try:
        cluster.wait(socket.exists if auth == "local" else lambda: listens(port))
        token.write_text("not a token")
        rest = Actuator(cluster, tmp_path / "rest", **settings)
        if auth == "jwt":
            with pytest.raises(SchedulerError, match=r"rejects the token|token may be invalid or expired"):
                rest.scheduler.read_fleet()
            token.write_text(cluster.run("scontrol", "token", "lifespan=600").partition("=")[2])
        assert rest.scheduler.port.node("zz") is None
        assert {node.name: node.version for node in rest.scheduler.port.nodes()} == {
            node.name: node.version for node in actuator.scheduler.port.nodes()
        }
        assert rest.scheduler.port.jobs() == actuator.scheduler.port.jobs()
        fleet = rest.scheduler.read_fleet()
        if cluster.release == "installed":
            assert fleet.error == "slurmrestd's v0.0.38 cannot write nodes: Slurm is read-only"
            assert rest.apply(an("swap", "n1")).kind == "refused"
            assert rest.node("n1").out == frozenset()
            return
        assert fleet.error is None
        assert rest.apply(an("swap", "n2")).kind == "refused"
        for _ in range(2):  # again after a release
            for verb in ("publish", "avoid", "swap", "drain"):
                assert rest.apply(an(verb, "n1")).kind == "done"
            node = actuator.node("n1")
            assert (node.out, node.weight, rest.level("n1")) == ({"DRAIN"}, 1_000_001, Level.DRAIN)
            assert (node.reason or "").startswith("predrain: tier=high")
            assert rest.apply(an("release", "n1")).kind == "done"
            node = actuator.node("n1")
            assert (node.out, node.reason, node.weight, node.extra) == (frozenset(), None, 1, "")
        work = rest.job("n1", job)
        ask = CheckpointAsk("a" * 32, datetime.now(UTC) + HOUR, "high")
        assert rest.workloads.ask_checkpoint(work, ask, rest.fence()).kind == "done"
        cluster.wait(log.exists)
        assert rest.workloads.evict(work, rest.fence()).kind == "refused"
    finally:
        process.terminate()
        process.wait(120)
