"""Actions of the ladder in the ledger: what they were expected to save, what they cost, and what came out."""

import json
import sqlite3
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest

from policy.breaker import BreakerConfig
from policy.ladder.cost_benefit import CostBenefitConfig
from policy.plan import RungRequest
from scheduler.ledger.reader import LedgerReader
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.records import PendingCall, Settled
from tests.policy.decide_world import STEP, T0
from tests.scheduler.cluster import Cluster

HOUR = timedelta(hours=1)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "ledger.db"


def acted(file, **risks):
    cluster = Cluster(ledger=SqliteLedger(file))
    cluster.scored(**risks)
    cluster.round()
    return cluster


def only(file, now, alerts=()):
    (use,) = LedgerReader(file).rungs(None, now, 50, alerts)
    return use


def test_a_drain_costs_the_gpu_hours_out_of_service_until_its_release(file):
    cluster = acted(file, n1=0.9)
    use = only(file, T0 + 2 * HOUR)
    (worth,) = (drain["worth"] for drain in LedgerReader(file).drains(""))
    gpus = worth["gpus"]
    assert (use.node, use.rung, use.decision, use.outcome) == ("n1", "drain", 1, "not yet known")
    assert use.saves == pytest.approx(worth["saved"] - worth["lost"])
    stop = 4 * (1 + 0.25)  # half a checkpoint interval and a restart, on each GPU of its job
    assert use.costs == pytest.approx(stop + gpus * CostBenefitConfig().verify / HOUR)
    assert use.cost == pytest.approx(2 * gpus)
    cluster.clock.move(4 * STEP)  # the prediction expires
    cluster.round()
    released = (cluster.clock.now() - T0) / HOUR
    assert only(file, T0 + 1000 * HOUR).cost == pytest.approx(gpus * released)


def test_a_soft_taint_costs_nothing_and_says_whether_an_incident_followed(file):
    acted(file, n1=0.4)
    for verdict, outcome in (("right", "an incident followed"), ("wrong", "no incident followed")):
        use = only(file, T0 + HOUR, [("n1", T0, HOUR, verdict), ("n2", T0, HOUR, "inconclusive")])
        assert (use.rung, use.costs, use.cost, use.outcome) == ("avoid", 0, 0, outcome)
        assert use.saves > 0
    assert only(file, T0 + HOUR, [("n1", T0 - 2 * HOUR, HOUR, "right")]).outcome == "not yet known"


def test_a_call_that_was_refused_costs_nothing(file):
    cluster = Cluster(ledger=SqliteLedger(file))
    cluster.scored(n1=0.4)
    cluster.scheduler.faults.plan("refused", "apply")
    cluster.round()
    uses = LedgerReader(file).rungs("n1", T0)
    assert [(use.cost, use.outcome) for use in uses] == [(0.0, "not carried out: refused")]


def _asked(file, rung, findings, *, jobs=1):
    """Record a request, with a call for each job, and its findings; return the action."""
    ledger = acted(file).ledger
    request = RungRequest(rung, "n1", 0.074, T0 + HOUR, 0.98, 0.1, ("idle at a risk of 7.4 %",))
    for job in range(jobs):
        call = PendingCall(T0 + HOUR, "n1", rung, f"k{job}", "scheduler", request=request)
        ledger.settle(ledger.call(call), Settled(T0 + HOUR, "done", confirmed=True))
    for kind, content in findings:
        ledger.find(T0 + 2 * HOUR, "n1", kind, "", content)
    return only(file, T0 + 3 * HOUR)


@pytest.mark.parametrize("result", ["passed", "failed", "inconclusive"])
def test_a_probe_costs_its_idle_gpu_hours_at_the_cost_of_an_idle_gpu(file, result):
    other = ("probed", {"key": "other", "result": "passed", "idle_gpu_hours": 9.0})
    use = _asked(file, "probe", [other, ("probed", {"key": "k0", "result": result, "idle_gpu_hours": 2.0})])
    assert (use.saves, use.costs, use.outcome) == (0.98, 0.1, f"test {result}")
    assert use.cost == pytest.approx(2.0 * 0.05)
    assert use.basis == "2.00 idle GPU-hours at 0.05 each"


@pytest.mark.parametrize(
    ("findings", "cost", "outcome"),
    [
        ([], None, "not yet known"),
        ([("acknowledged", {"key": "k1"})], 0.1, "checkpoint written"),
        ([("unanswered", {"key": "k0"})], None, "no checkpoint written"),
    ],
)
def test_a_checkpoint_of_several_jobs_is_one_action_that_costs_what_was_expected(file, findings, cost, outcome):
    use = _asked(file, "checkpoint", findings, jobs=2)
    assert (use.cost, use.outcome) == (cost, outcome)


def test_a_drain_recorded_by_an_earlier_version_says_what_is_not_known(file):
    acted(file, n1=0.9)
    with sqlite3.connect(file) as link:
        text, call = link.execute(
            "SELECT d.content, c.content FROM decisions d, calls c WHERE c.node = d.node AND c.verb = 'drain'"
        ).fetchone()
        content = json.loads(text)
        del content["worth"]["expected"], content["worth"]["gpus"], content["breaker"]
        link.execute(
            "INSERT INTO rounds SELECT 9, at, holder, code, model, NULL, '{}', plan, digest, summary FROM rounds"
        )
        link.execute("INSERT INTO decisions VALUES (9, 'n1', ?)", (json.dumps(content),))
        link.execute("INSERT INTO calls VALUES (99, 9, ?, 'n1', 'drain', ?)", (T0.isoformat(), call))
        link.execute("INSERT INTO settled VALUES (99, ?, 'done', 1, '{}')", (T0.isoformat(),))
    use = LedgerReader(file).rungs("n1", T0 + HOUR)[0]
    assert use.cells["Expected cost"] == "not known"
    assert use.saves == pytest.approx(content["worth"]["saved"] - content["worth"]["lost"])
    assert LedgerReader(file).why("n1")[0]["breaker"] == {}


def test_why_names_only_the_breakers_of_the_nodes_group(file):
    cluster = Cluster(ledger=SqliteLedger(file))
    cluster.policy = replace(cluster.policy, breaker=BreakerConfig(min_risky=2, max_risky=0.5))
    cluster.restart()
    for name in ("n6", "n7"):
        base = replace(cluster.scheduler.nodes[name].base, group="h")
        cluster.scheduler.edit(name, partial(replace, base=base))
    cluster.scored(n1=0.9, n6=0.9, n7=0.9)
    cluster.round()
    reader = LedgerReader(file)
    assert reader.why("n1")[0]["breaker"] == {}
    assert list(reader.why("n6")[0]["breaker"]) == ["risky c/h"]
