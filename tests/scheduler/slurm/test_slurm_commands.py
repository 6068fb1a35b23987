"""Slurm by its commands: versions, shapes, and every way in which a program can fail to answer."""

from datetime import UTC, datetime, timedelta

import pytest

from scheduler.ports.errors import SchedulerError
from scheduler.slurm.commands import SlurmCommands
from scheduler.slurm.job import CheckpointSignal, Requirements, job_of, views_by_node
from scheduler.slurm.node import NodeChange
from scheduler.slurm.settings import SlurmSettings
from tests.policy.decide_world import HOUR, T0
from tests.scheduler.slurm.fake_slurm import FakeSlurm, job_row, number_of

SECOND = timedelta(seconds=1)


def opened(fake: FakeSlurm, **given: object) -> SlurmCommands:
    return SlurmCommands(SlurmSettings("/nowhere", bin_dir=str(fake.folder), **given))


def test_the_time_of_slurmctld_is_read(tmp_path):
    fake = FakeSlurm(tmp_path / "bin")
    assert opened(fake).server_time() is None
    fake.tell(time=1796047292)
    assert opened(fake).server_time() == datetime(2026, 11, 30, 14, 1, 32, tzinfo=UTC)


@pytest.mark.parametrize("version", [38, 40, 44])
def test_every_version_is_read_and_written_alike(tmp_path, version):
    fake = FakeSlurm(tmp_path / "bin", version)
    port = opened(fake)
    assert port.read_only() == "Slurm has not been read yet"
    assert port.update("n1", NodeChange("DRAIN", "r")).kind == "refused"
    assert [item.name for item in port.nodes()] == ["n0", "n1"]
    assert port.read_only() is None
    change = NodeChange("DRAIN", 'it "is" so', extra='{"a": "b c"}', weight=9)
    assert port.update("n1", change).kind == "done"
    node = port.node("n1")
    assert (node.out, node.reason, node.extra, node.weight) == ({"DRAIN"}, 'it "is" so', '{"a": "b c"}', 9)
    assert node.reason_at == datetime.fromtimestamp(1771000000, UTC)
    assert port.update("n1", NodeChange("UNDRAIN")).kind == "done"
    released = port.node("n1")
    assert (released.out, released.reason) == (frozenset(), None)
    assert port.node("zz") is None
    assert port.update("zz", change).kind == "gone"
    fake.tell(denied=True)
    assert port.update("n1", change).kind == "refused"


def test_a_newer_slurm_is_asked_for_a_version_that_we_know(tmp_path):
    fake = FakeSlurm(tmp_path / "bin", 99)
    port = opened(fake)
    assert len(port.nodes()) == 2
    assert port.read_only() is None
    port.node("n0")
    assert "--json=v0.0.45" in fake.calls[-1]


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"version": 99, "only_own": True}, "data parser v0.0.99; v0.0.38 to v0.0.45 are known"),
        ({"version": 37}, "data parser v0.0.37"),
        ({"version": 42, "meta": {}}, "does not state the version"),
        ({"version": 42, "meta": {"data_parser": "data_parser/v1.2.3"}}, "does not state the version"),
    ],
)
def test_a_version_that_is_not_known_is_read_and_never_written_to(tmp_path, report, message):
    fake = FakeSlurm(tmp_path / "bin")
    fake.tell(**report)
    port = opened(fake)
    assert len(port.nodes()) == 2
    assert message in (port.read_only() or "")
    answer = port.update("n0", NodeChange("DRAIN", "r"))
    assert answer.kind == "refused"
    assert message in answer.message
    assert [call for call in fake.calls if "update" in call] == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("truncated", "the output is truncated or not JSON"),
        ("garbage", "the output is truncated or not JSON"),
        ("slow", "no answer within 0.3 s"),
        ("endless", "its output exceeds 200,000 bytes"),
        ("fails", "Unable to contact slurm controller"),
    ],
)
def test_what_cannot_be_read_wholly_is_not_read(tmp_path, fault, message):
    fake = FakeSlurm(tmp_path / "bin")
    fake.tell(fault={"scontrol": fault, "squeue": fault})
    slow = timedelta(seconds=0.3 if fault == "slow" else 20)
    port = opened(fake, timeout=slow, max_response_bytes=200_000)
    with pytest.raises(SchedulerError, match=message):
        port.nodes()
    with pytest.raises(SchedulerError, match=message):
        port.jobs()


def test_errors_in_a_report_and_an_empty_list_of_nodes_are_reported(tmp_path):
    fake = FakeSlurm(tmp_path / "bin")
    fake.tell(fault={"scontrol": "noise"})
    port = opened(fake)
    assert len(port.nodes()) == 2
    fake.tell(errors=[{"error": "Unspecified error", "errno": -1}])
    with pytest.raises(SchedulerError, match=r"Slurm reports .*Unspecified error"):
        port.jobs()
    fake.tell(errors=[], nodes=[])
    with pytest.raises(SchedulerError, match="Slurm lists no nodes"):
        port.nodes()
    with pytest.raises(SchedulerError, match="No such file"):
        SlurmCommands(SlurmSettings("/nowhere", bin_dir=str(tmp_path / "none"))).nodes()


def test_a_write_that_is_cut_off_or_finds_no_controller_is_unknown(tmp_path):
    fake = FakeSlurm(tmp_path / "bin")
    port = opened(fake, timeout=timedelta(seconds=1))
    port.nodes()
    fake.tell(fault={"scontrol": "fails"})
    assert port.update("n0", NodeChange(weight=2)).kind == "timeout"
    fake.tell(fault={"scontrol": "slow"})
    assert port.update("n0", NodeChange(weight=2)).kind == "timeout"
    assert port.update("n0", NodeChange(extra="a\0b")).kind == "refused"


def test_a_users_own_filters_do_not_reach_the_lists(tmp_path, monkeypatch):
    fake = FakeSlurm(tmp_path / "bin")
    for name in ("SQUEUE_STATES", "SINFO_PARTITION", "SLURM_CLUSTERS", "SLURM_KEPT"):
        monkeypatch.setenv(name, "x")
    opened(fake, slurm_conf="/etc/other.conf").nodes()
    seen = fake.calls[0][-1].removeprefix("E=").split(",")
    assert "SLURM_CONF" in seen
    assert "SLURM_KEPT" in seen
    assert not {"SQUEUE_STATES", "SINFO_PARTITION", "SLURM_CLUSTERS"} & set(seen)
    assert {"SCONTROL_LOCAL", "SINFO_LOCAL", "SQUEUE_LOCAL"} <= set(seen), "not all clusters of a federation"


def test_jobs_of_every_kind_are_read(tmp_path):
    fake = FakeSlurm(tmp_path / "bin")
    number = {"set": True, "infinite": False, "number": 2}
    fake.tell(jobs=[
        job_row(5, "n[0-1]", comment="predrain.checkpoint=B:USR1@300"),
        job_row(6, "n0", array_job_id={**number, "number": 4}, array_task_id=number, gres_detail=["gpu:h1:2(IDX:0-1)"]),
        job_row(7, "n1", het_job_id={**number, "number": 7}, tres_alloc_str="gres/gpu=1"),
        job_row(8, "n0", het_job_id={**number, "number": 7}, het_job_offset={**number, "number": 1}, requeue=False),
        job_row(9, "", state="PENDING"), job_row(10, "n0", state="COMPLETED"), job_row(11, "n0", state="COMPLETING"),
        job_row(12, "n1", time_limit={**number, "set": False}),
    ])  # fmt: skip
    port = opened(fake)
    jobs = {job.name: job for job in port.jobs()}
    assert list(jobs) == ["5", "4_2", "7+0", "7+1", "11", "12"]
    assert (jobs["5"].nodes, jobs["5"].gpus, jobs["4_2"].gpus) == (("n0", "n1"), 16, 2)
    assert (jobs["7+1"].leader, jobs["7+1"].requeue, jobs["11"].state) == (7, False, "ending")
    assert jobs["5"].signal == CheckpointSignal("USR1", True, timedelta(seconds=300))
    assert jobs["5"].ends_at == datetime.fromtimestamp(1771086500, UTC)
    assert jobs["12"].ends_at is None
    assert {job.name for job in port.jobs("n1")} == {"5", "7+0", "12"}
    views = views_by_node(port.jobs())
    assert {item.name: item.gpus for item in views["n0"]} == {"5": 16, "4_2": 2, "7": 17, "11": 16}
    port.nodes()
    assert port.signal(jobs["5"], CheckpointSignal("USR1", True, None)).kind == "done"
    assert fake.calls[-1][:-1] == ["scancel", "--signal=USR1", "--batch", "5"]
    assert port.signal(jobs["7+1"], CheckpointSignal("USR1", False, None)).kind == "done"
    assert fake.calls[-1][:-1] == ["scancel", "--signal=USR1", "7+1"], "the bare id of the first would reach all"
    assert port.requeue(jobs["7+1"]).kind == "done"
    assert fake.calls[-1][:-1] == ["scontrol", "requeue", "7"], "a heterogeneous job goes as a whole"


def test_a_task_is_named_by_its_index_for_the_bare_id_of_the_last_one_is_that_of_the_whole_array(tmp_path):
    fake = FakeSlurm(tmp_path / "bin")
    fake.tell(jobs=[
        job_row(number, f"n{task % 2}", array_job_id=number_of(1), array_task_id=number_of(task))
        for task, number in ((1, 2), (2, 3), (3, 1))
    ])  # fmt: skip
    port = opened(fake)
    port.nodes()
    for job in port.jobs():
        assert port.signal(job, CheckpointSignal("USR1", True, None)).kind == "done"
        assert port.requeue(job).kind == "done"
    named = [call[-2] for call in fake.calls if call[0] == "scancel" or call[1] == "requeue"]
    assert named == ["1_1", "1_1", "1_2", "1_2", "1_3", "1_3"]


def test_a_job_that_goes_between_the_list_and_the_call_is_gone(tmp_path):
    fake = FakeSlurm(tmp_path / "bin")
    fake.tell(jobs=[job_row(5, "n0")])
    port = opened(fake)
    port.nodes()
    jobs = {job.name: job for job in port.jobs()}
    fake.tell(jobs=[])
    assert port.requeue(jobs["5"]).kind == "gone"


def test_what_a_job_requires_of_its_nodes_is_read(tmp_path):
    fake = FakeSlurm(tmp_path / "bin")
    fake.tell(reservations={"r1": "n[0-1]", "empty": "(null)", "over": "n[0-1]"}, jobs=[
        job_row(
            5, "n0", required_nodes="n[0,2]", excluded_nodes="n3", features="h100&ib", partition="gpu,debug",
            resv_name="r1", contiguous=True, minimum_cpus_per_node=number_of(4), memory_per_cpu=number_of(2000),
            memory_per_node={"set": False, "infinite": False, "number": 0}, tres_per_node="gres/gpu:h100=8",
            tres_per_task="cpu=4,gres/nic:1", minimum_tmp_disk_per_node=number_of(9000),
            priority=number_of(0), account="team", qos="high",
        ),
        job_row(6, "n0", state="SUSPENDED", priority=number_of(0), required_nodes="", resv_name=""),
        job_row(7, "n0", state="STOPPED"), job_row(8, "n0", state="COMPLETING", priority=number_of(0)),
    ])  # fmt: skip
    port = opened(fake)
    held, suspended, stopped, ending = port.jobs("n0")
    assert held.needs == Requirements(
        frozenset({"n0", "n2"}), frozenset({"n3"}), frozenset({"gpu", "debug"}), "h100&ib", "r1", True, 4, 8000, 9000,
        frozenset({"gpu", "gpu:h100", "nic"}), 1440, "team", "high",
    )  # fmt: skip
    assert [job.state for job in (held, suspended, stopped, ending)] == ["held", "suspended", "suspended", "ending"]
    assert stopped.needs == Requirements(minutes=1440)
    assert port.reserved_nodes("r1") == {"n0", "n1"}
    assert port.reserved_nodes("empty") == frozenset()
    assert port.reserved_nodes("over") == frozenset(), "Slurm holds a job that is requeued into it"
    with pytest.raises(SchedulerError, match="reservation r2`: Reservation r2 not found"):
        port.reserved_nodes("r2")
    assert {name: fields["State"] for name, fields in port.partitions().items()} == {"g": "UP", "old": "INACTIVE"}


@pytest.mark.parametrize(
    ("row", "cpus", "memory_mb"),
    [
        ({"memory_per_tres": "gres:gpu:50", "tres_req_str": "cpu=1,mem=400M,node=1,billing=1"}, 1, 400),  # 22.05
        (
            {
                "memory_per_tres": "gres/gpu:50",
                "memory_per_node": number_of(50),
                "tres_req_str": "cpu=8,mem=400M,node=1,billing=8",
            },  # 24.11
            8,
            400,
        ),
        ({"memory_per_cpu": number_of(2000), "tres_req_str": "cpu=64,mem=125G,gres/gpu=8"}, 64, 128_000),
        ({"memory_per_tres": "gres/gpu:9", "tres_req_str": "cpu=2,mem=1.5T"}, 2, 1_572_864),
        ({"memory_per_node": number_of(0), "tres_req_str": "cpu=2,mem=1.5T"}, 2, 0),
        ({"minimum_cpus_per_node": number_of(4), "memory_per_node": number_of(900), "tres_req_str": "node=1"}, 4, 900),
        ({"tres_req_str": "billing=8,gres/mem=7,cpu=?"}, 0, 0),
    ],
)
def test_what_a_job_requests_by_gpu_or_task_is_read_from_its_total(row, cpus, memory_mb):
    needs = job_of(job_row(5, "n0", **row), "gpu").needs
    assert (needs.cpus, needs.memory_mb) == (cpus, memory_mb)
    total = {"tres_req_str": "cpu=65,mem=3G"}
    assert job_of(job_row(5, "n[0-1]", **total), "gpu").needs.cpus == 33


@pytest.mark.parametrize(
    ("field", "tied"), [({"segment_size": number_of(16)}, True), ({"contiguous": True}, True), ({}, False)]
)
def test_nodes_in_one_block_and_burst_buffers_are_read(field, tied):
    row = {"segment_size": number_of(0), "burst_buffer": "#BB x" if tied else "", **field}
    job = job_of(job_row(5, "n0", **row), "gpu")
    assert (job.needs.contiguous, job.burst_buffer) == (tied, tied)


@pytest.mark.parametrize(
    ("field", "cron"),
    [
        ({"cron": {"minute": "0", "hour": "3"}}, True),
        ({"flags": ["CRON_JOB"], "cron": ""}, True),
        ({"cron": ""}, False),
    ],
)
def test_a_job_of_a_crontab_is_known(field, cron):
    assert job_of(job_row(5, "n0", **field), "gpu").cron is cron


def test_a_job_that_cannot_be_read_spoils_the_list(tmp_path):
    fake = FakeSlurm(tmp_path / "bin")
    fake.tell(jobs=[job_row(5, "n0"), job_row(0, "n0")])
    with pytest.raises(SchedulerError, match="a row of jobs cannot be read: a job without a number"):
        opened(fake).jobs()


@pytest.mark.parametrize(
    ("comment", "signal", "held"),
    [
        ("predrain.checkpoint=USR1", CheckpointSignal("USR1", False, None), False),
        ("Predrain.Checkpoint=USR1", CheckpointSignal("USR1", False, None), False),
        ("a; predrain.checkpoint=SIGUSR2@9, predrain.keep", CheckpointSignal("USR2", False, 9 * SECOND), True),
        *((f"predrain.checkpoint={text}", None, True) for text in ("KILL", "usr1", "$(reboot)", "USR1@5m", "")),
        *((f"predrain.keep{text}", None, True) for text in ("=yes", "=until-friday", "=", "=24h")),
        *((f"predrain.keep={text}", None, False) for text in ("no", "False", "0")),
        *((text, None, True) for text in ("predrain.keep!", "(predrain.keep)", "predrain-keep", "predrain: keep")),
        ("#predrain_keep", None, True),
        ("PREDRAIN.KEEP", None, True),
        ("notpredrain.checkpoint=USR1 notpredrain.keep", None, False),
        ("", None, False),
    ],
)  # fmt: skip
def test_a_comment_names_the_signal_and_an_unclear_one_keeps_the_job(comment, signal, held):
    job = job_of(job_row(5, "n0", comment=comment), "gpu")
    assert (job.signal, job.opt_out is not None) == (signal, held)
    by_admin = job_of(job_row(5, "n0", comment="mine", admin_comment=comment), "gpu")
    assert (by_admin.signal, by_admin.opt_out is not None) == (signal, held)


@pytest.mark.parametrize("state", ["RUNNING", "SIGNALING", "RESIZING"])
def test_a_running_job_that_is_reported_by_a_flag_alone_is_still_asked_for_its_checkpoint(state):
    job = job_of(job_row(5, "n0", state=state, comment="predrain.checkpoint=USR1"), "gpu")
    assert (job.state, "RUNNING" in job.states) == ("running", True)


def test_a_deadline_tells_until_when_a_job_may_start_again():
    def start_by(**fields: object) -> object:
        job = job_of(job_row(5, "n0", **fields), "gpu")
        return job.start_by

    end = int((T0 + 3 * HOUR).timestamp())
    assert start_by() is None
    assert start_by(deadline=0) is None
    assert start_by(deadline=end, time_limit=60) == T0 + 2 * HOUR
    assert start_by(deadline={"set": True, "number": end}, time_limit={"set": True, "number": 60}) == T0 + 2 * HOUR
    assert start_by(deadline=end, time_limit={"set": False, "infinite": True}) == T0 + 3 * HOUR
