"""The ledger: what it keeps, what it refuses, and whether a decision comes out again."""

import json
import random
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta, timezone

import pytest

from foundation.errors import InputError
from foundation.running import Patience
from policy.config import PolicyConfig
from policy.fleet import Fact, JobView, Level, Marks, NodeView, Published, Score, Signals, UnitView
from policy.node_tier.hard_rules import HardRule, HardRulesConfig
from policy.plan import PolicyState
from scheduler.ledger import schema
from scheduler.ledger.reader import LedgerReader
from scheduler.ledger.sqlite_ledger import SqliteLedger, fleet_of, inputs_of
from scheduler.ports.errors import LedgerError
from scheduler.ports.readings import Switches
from scheduler.ports.records import RoundRecord
from scheduler.ports.risks import ReportedFacts
from tests import waiting
from tests.policy.decide_world import STEP, T0
from tests.processes import hanging
from tests.scheduler.cluster import Cluster, without_our_taints
from tests.scheduler.faults import Crash


@pytest.fixture
def file(tmp_path):
    return tmp_path / "ledger.db"


def history(file):
    """A drain, a person's undoing, an over-budget node, an expiry."""
    cluster = Cluster(ledger=SqliteLedger(file))
    rules = HardRulesConfig((HardRule("xid 63", "elevated", STEP, "a row remap is pending"),))
    cluster.policy = replace(cluster.policy, rules=rules)
    cluster.restart()
    cluster.scored(n1=0.9, n2=0.4)
    cluster.facts.facts = {"n6-1": ReportedFacts((Fact("xid 63", T0),))}
    cluster.round()
    cluster.clock.move(STEP)
    cluster.scored(n1=0.9, n3=0.8, n4=0.7, n5=0.95)
    cluster.write("n2", lambda node: without_our_taints(node, cluster))
    cluster.round()
    cluster.clock.move(3 * STEP)
    cluster.round()
    return cluster


def test_every_recorded_decision_comes_out_the_same_again(file):
    history(file)
    reader = LedgerReader(file)
    numbers = [item["decision"] for item in reader.rounds()]
    assert len(numbers) >= 3
    for number in numbers:
        assert reader.replay(number).differences == ()


def test_a_decision_that_would_come_out_otherwise_reports_where(file, monkeypatch):
    history(file)
    monkeypatch.setattr("scheduler.ledger.reader.decide", _otherwise)
    result = LedgerReader(file).replay(1)
    assert [difference for difference in result.differences if difference.startswith("nodes.n1.risk: ")]


def _otherwise(*given):
    from policy.decide import decide

    plan = decide(*given)
    return replace(plan, nodes={**plan.nodes, "n1": replace(plan.nodes["n1"], risk=0.5)})


def test_why_reports_risk_reasons_model_budget_what_was_read_written_and_answered(file):
    history(file)
    result = LedgerReader(file).why("n1")
    assert [item["decision"] for item in result] == sorted((item["decision"] for item in result), reverse=True)
    first = result[-1]
    assert first["risk"] == pytest.approx(1 - 0.1 * 0.99)
    assert "its errors rise" in " ".join(first["reasons"])
    assert first["model"] == {"digest": "d" * 64, "profile": "stacked", "version": 3}
    assert any(use["scope"] == ["cluster", "c"] and use["lost"] == 1 for use in first["budget"])
    taint = next(call for call in first["calls"] if call["verb"] == "swap")
    assert taint["answer"] == "done"
    assert taint["confirmed"]
    assert taint["read"]["view"]["name"] == "n1"
    assert {write["path"] for write in taint["wrote"]} == {
        "metadata.labels[predrain.io/risk-tier]",
        "metadata.annotations[predrain.io/prediction]",
        "metadata.annotations[predrain.io/applied-taints]",
        "spec.taints",
    }
    assert result[0]["calls"][0]["verb"] == "release"
    refused = LedgerReader(file).why("n4")
    assert "1 of 3 nodes are out of service, at most 1 allowed" in next(
        item["over_budget"] for item in refused if item["over_budget"]
    )


def test_drains_are_listed_with_what_they_were_weighed_to_be_worth(file):
    history(file)
    reader = LedgerReader(file)
    drained = reader.drains("")
    assert [(drain["node"], drain["at"]) for drain in drained] == [
        (call["node"], call["at"]) for call in reader.actions(verb="drain") if call["confirmed"]
    ]
    assert all(drain["worth"]["choice"] == "drain" and drain["worth"]["saved"] > 0 for drain in drained)
    assert reader.drains("2100-01-01") == []
    assert reader.counts()["drain"] == len(drained)


def test_a_node_out_of_service_has_a_start_a_reason_and_an_expiry_until_it_returns(file):
    cluster = Cluster(4, ledger=SqliteLedger(file))
    reader = LedgerReader(file)
    start = cluster.clock.now()
    for _ in range(2):
        cluster.scored(n1=0.9)
        cluster.round()
        ((node, entry),) = reader.out_of_service().items()
        assert (node, entry["level"]) == ("n1", "drain")
        assert datetime.fromisoformat(entry["since"]) == start
        assert datetime.fromisoformat(entry["expires_at"]) > cluster.clock.now()
        assert "90" in entry["reasons"][0]
        cluster.clock.move(timedelta(minutes=1))
    cluster.clock.move(3 * STEP)
    cluster.round()
    assert reader.out_of_service() == {}


def test_actions_are_found_by_pattern_verb_time_and_page(file):
    history(file)
    reader = LedgerReader(file)
    every = reader.actions()
    assert [call["call"] for call in every] == sorted((call["call"] for call in every), reverse=True)
    assert all(call["decision"] for call in every)
    taints = reader.actions("n[12]", "swap")
    assert {call["node"] for call in taints} <= {"n1", "n2"}
    assert {call["verb"] for call in taints} == {"swap"}
    assert reader.actions(before=every[0]["call"], limit=2) == every[1:3]
    last = every[0]["at"]
    assert reader.actions(since=last) == [call for call in every if call["at"] >= last]
    assert reader.actions(until=last) == [call for call in every if call["at"] < last]
    assert reader.last_actions()["n1"] == ("release", next(call["at"] for call in every if call["node"] == "n1"))
    assert "n9" not in reader.last_actions()


def test_why_of_an_unknown_node_reports_it(file):
    history(file)
    with pytest.raises(InputError, match=r"the ledger has no records of node 'n99' \(.*\)\. Check the name"):
        LedgerReader(file).why("n99")
    with pytest.raises(InputError, match=r"unknown decision 99"):
        LedgerReader(file).replay(99)


def test_an_upgrade_goes_on_with_open_calls_about_workloads_as_an_earlier_version_knew_them(file):
    ledger = SqliteLedger(file)
    workload = {"name": "a", "uid": "a-1", "kind": "pod", "node": "n1", "held": None, "checkpoint": {"url": "x"}}
    call = {"at": T0.isoformat(), "node": "n1", "key": "k", "kind": "evict", "means": "exec", "workload": workload}
    with sqlite3.connect(file) as link:
        link.execute(
            "INSERT INTO calls (at, node, verb, content) VALUES (?, 'n1', 'evict', ?)", (call["at"], json.dumps(call))
        )
    ((_, listed),) = ledger.open_calls()
    assert (listed.kind, listed.workload.name, listed.workload.uid) == ("evict", "a", "a-1")


def test_an_upgrade_settles_an_action_of_an_earlier_version_and_goes_on(file):
    cluster = Cluster(ledger=SqliteLedger(file))
    cluster.scored(n1=0.9)
    cluster.scheduler.faults.plan("crash_after", "apply")
    with pytest.raises(Crash):
        cluster.round()
    with sqlite3.connect(file) as link:
        round_, at, node, verb, text = link.execute("SELECT round, at, node, verb, content FROM calls").fetchone()
        call = json.loads(text)
        call["action"]["worth"] = call["read"]["view"]["undone"] = call["step"] = False  # of no use to this version
        link.execute("INSERT INTO settled SELECT id, at, 'done', 1, '{}' FROM calls")
        link.execute(
            "INSERT INTO calls (round, at, node, verb, content) VALUES (?, ?, ?, ?, ?)",
            (round_, at, node, verb, json.dumps(call)),
        )
    cluster.restart()
    cluster.clock.move(STEP)
    report = cluster.round()
    assert (report.errors, cluster.ledger.unsettled()) == ([], ())
    assert "swap n1 was interrupted: the call was interrupted; read again: in the desired state" in report.notes
    assert cluster.level("n1") is Level.DRAIN


def test_rows_are_only_ever_added(file):
    history(file)
    link = sqlite3.connect(file)
    link.execute("INSERT INTO cluster VALUES ('c')")
    tables = [name for (name,) in link.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    filled = {
        table: [column for _, column, *_ in link.execute(f"PRAGMA table_info({table})")]
        for table in tables
        if not table.startswith("sqlite_") and link.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    }
    assert filled.keys() >= {"blobs", "rounds", "decisions", "alerts", "calls", "settled", "cluster"}
    for table, columns in filled.items():
        for change in (f"DELETE FROM {table}", *(f"UPDATE {table} SET {name} = {name}" for name in columns)):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                link.execute(change)
    link.close()


def test_nodes_and_units_are_kept_as_all_else_is(file):
    since = T0.astimezone(timezone(timedelta(hours=2)))
    score = Score(1e-7, since, T0 + STEP, ("eins, \u00fc", 'a "b"'))
    units = (UnitView("g0", score, (Fact("xid 79", T0),), T0), UnitView("g1", Score(None, T0, T0)), UnitView("g2"))
    jobs = (JobView("j", 8, T0, None, T0 + STEP, can_checkpoint=True),)
    marks = Marks(Published("high", T0 + STEP), tainted=True, hard_since=since)
    node = NodeView(
        "n1", "c", "g", "r", None, units, jobs, marks, opt_out="x=y", down=True, marker_removed=True, software="d"
    )
    fleet = (node, NodeView("n2", "c", "g"))
    record = RoundRecord(fleet, PolicyState(), Signals(T0), PolicyConfig(), None, None, None, "h", "1")
    given = inputs_of(record)
    nodes, kept = json.loads(given["nodes"]), json.loads(given["units"])
    assert fleet_of(nodes, kept) == fleet
    assert set(nodes[0]) | {"units"} == {field.name for field in fields(NodeView)}


def test_scores_and_settings_that_did_not_change_are_kept_once(file):
    cluster = Cluster(ledger=SqliteLedger(file))
    for node in ("n1", "n2", "n3"):
        cluster.clock.move(timedelta(minutes=1))
        cluster.scored(**{node: 0.15})
        cluster.round()
    link = sqlite3.connect(file)
    rounds = link.execute("SELECT count(*) FROM rounds").fetchone()[0]
    configs = link.execute("SELECT count(DISTINCT json_extract(inputs, '$.config')) FROM rounds").fetchone()[0]
    link.close()
    assert (rounds, configs) == (3, 1)


def test_a_ledger_in_use_is_not_to_be_moved_away(file, monkeypatch):
    monkeypatch.setattr(schema, "_BUSY_S", 0.0)
    with closing(sqlite3.connect(file, isolation_level=None)) as link:
        link.execute("BEGIN EXCLUSIVE")
        with pytest.raises(InputError, match="the ledger is in use") as refused:
            SqliteLedger(file)
    assert refused.value.advice == "Run again."


def test_a_newer_foreign_or_damaged_file_is_refused(file, tmp_path):
    history(file)
    link = sqlite3.connect(file)
    for version, do in ((3, "Use the predrain that wrote"), (1, "move it away, and start a new one")):
        link.execute(f"PRAGMA user_version = {version}")
        with pytest.raises(InputError, match=rf"the ledger has version {version}, but this code reads 2 .*{do}"):
            SqliteLedger(file)
    link.close()

    other = tmp_path / "other.db"
    link = sqlite3.connect(other)
    link.execute("CREATE TABLE theirs (x)")
    link.commit()
    link.close()
    with pytest.raises(InputError, match="the file is not a ledger"):
        SqliteLedger(other)

    text = tmp_path / "text.db"
    text.write_text("notes " * 1000)
    with pytest.raises(InputError, match=r"the ledger is damaged: file is not a database .* move it away, and start"):
        SqliteLedger(text)
    with pytest.raises(InputError, match="no ledger found"):
        LedgerReader(tmp_path / "absent.db")
    with pytest.raises(InputError, match="the folder of the ledger does not exist"):
        SqliteLedger(tmp_path / "absent" / "ledger.db")


def test_a_ledger_with_overwritten_pages_is_refused(file):
    cluster = history(file)
    cluster.ledger.close()
    content = bytearray(file.read_bytes())
    content[4096:8192] = b"\xff" * 4096
    file.write_bytes(content)
    with pytest.raises(InputError, match="the ledger is damaged"):
        SqliteLedger(file)


def test_a_ledger_that_is_deleted_under_its_writer_would_record_into_nothing_and_stops_what_is_new(file):
    ledger = SqliteLedger(file)
    cluster = Cluster(ledger=ledger)
    cluster.scored(n1=0.4)
    cluster.round()
    assert cluster.level("n1") is Level.AVOID
    file.unlink()
    cluster.clock.move(STEP)
    cluster.scored(n1=0.01, n2=0.9)
    for _ in range(2):
        report = cluster.round()
        cluster.clock.move(STEP)
        cluster.scored(n1=0.01, n2=0.9)
    assert any("was removed or replaced while open" in error for error in report.errors)
    assert cluster.level("n2") is Level.NONE, "nothing new that nobody could look up"
    assert cluster.level("n1") is Level.NONE, "a release is done all the same"
    SqliteLedger(file).close()
    cluster.scored(n2=0.9)
    assert cluster.round().errors, "another ledger in its place is not this one"


def test_a_full_disk_stops_what_is_new_and_no_release(file):
    ledger = SqliteLedger(file)
    cluster = Cluster(ledger=ledger)
    cluster.scored(n1=0.4)
    cluster.round()
    pages = ledger._link.execute("PRAGMA page_count").fetchone()[0]
    ledger._link.execute(f"PRAGMA max_page_count = {pages}")
    for k in range(1, 40):
        cluster.clock.move(STEP)
        cluster.scored(**{"n1": 0.01, "n2": 0.9, f"n{k % 4 + 3}": 0.11 + k / 1000})
        report = cluster.round()
        if report.errors:
            break
    assert "database or disk is full" in report.errors[0]
    before = cluster.levels()
    cluster.clock.move(STEP)
    cluster.scored(n1=0.01, n7=0.9)
    cluster.round()
    assert set(cluster.levels()) <= set(before)
    cluster.scheduler.switches = Switches(release_all=True)
    cluster.round()
    assert cluster.levels() == {}


def test_a_ledger_on_a_disk_that_hangs_delays_a_release_once_stops_what_is_new_and_is_used_again_afterwards(file):
    cluster, gate = Cluster(ledger=SqliteLedger(file)), threading.Event()
    for risks in ({"n1": 0.4}, {"n1": 0.01, "n2": 0.4}):
        cluster.scored(**risks)
        cluster.round()
        cluster.clock.move(STEP)
    assert set(cluster.levels()) == {"n1", "n2"}
    link = cluster.ledger._link
    link.create_function("hang", 0, lambda: gate.wait(300))
    link.execute("CREATE TEMP TRIGGER hangs BEFORE INSERT ON main.rounds BEGIN SELECT hang(); END")
    cluster.ledger.patience = Patience(1)
    for name, why in (("n1", "timed out after 1 s"), ("n2", "an earlier call has not ended yet")):
        cluster.scored(n2=0.01, n3=0.9)
        assert f"the ledger does not respond: {why}" in cluster.round().errors
        cluster.clock.move(STEP)
        assert (cluster.level(name), cluster.level("n3")) == (Level.NONE, Level.NONE)
    cluster.ledger.close()  # does not wait either
    gate.set()
    waiting.wait(lambda: not cluster.round().failed and cluster.level("n3").hard)


def test_a_ledger_whose_file_hangs_at_the_start_is_opened_once_it_answers(file):
    SqliteLedger(file).close()
    with hanging(file):
        with pytest.raises(LedgerError, match=r"the ledger does not respond: timed out after 0.2 s"):
            SqliteLedger(file, longest_s=0.2)
        cluster = Cluster(ledger=SqliteLedger(file, required=False, longest_s=0.2))
        cluster.scored(n1=0.9)
        assert cluster.round().errors
        assert cluster.levels() == {}
    waiting.wait(lambda: not cluster.round().failed and cluster.level("n1").hard)


def test_whatever_byte_is_changed_an_expired_mark_is_released_and_nothing_new_follows_an_unreadable_row(tmp_path):
    original = tmp_path / "original.db"
    cluster = history(original)
    cluster.scored(n1=0.9)
    cluster.scheduler.faults.plan("crash_after", "apply")
    with pytest.raises(Crash):
        cluster.round()  # leaves a call open
    cluster.ledger.close()
    content, chosen = original.read_bytes(), random.Random(7)
    nodes, state = dict(cluster.scheduler.nodes), cluster.scheduler.state
    cluster.clock.move(3 * STEP)
    for number in range(60):
        place = chosen.randrange(len(content))
        damaged = bytearray(content)
        damaged[place] ^= 1 << chosen.randrange(8)
        file = tmp_path / f"{number}.db"
        file.write_bytes(damaged)
        cluster.ledger = SqliteLedger(file, required=False)
        cluster.scheduler.nodes, cluster.scheduler.state = dict(nodes), state
        cluster.restart(holder="p")
        report = cluster.round()
        cluster.ledger.close()
        assert report.active
        assert cluster.levels() == {}, (place, report.errors)


@pytest.mark.parametrize("change", ["not JSON", '{"round": 1}', "[1]", '{"of_a_newer": "version"}', "null"])
@pytest.mark.parametrize(("table", "call"), [("calls", "unsettled"), ("alerts", "alerts"), ("calls", "open_calls")])
def test_a_row_that_cannot_be_read_is_an_error_of_the_ledger(file, table, call, change):
    ledger = SqliteLedger(file)
    link = sqlite3.connect(file)
    columns = {"unsettled": "round, at, node, verb", "alerts": "round, unit, at", "open_calls": "at, node, verb"}[call]
    given = ", ".join("1" for _ in columns.split(","))
    link.execute(f"INSERT INTO {table} ({columns}, content) VALUES ({given}, ?)", (change,))
    link.commit()
    link.close()
    with pytest.raises(LedgerError):
        getattr(ledger, call)(*([datetime.fromtimestamp(0, UTC)] if call == "alerts" else []))


def test_a_damaged_schema_text_is_an_error_of_the_ledger(file):
    SqliteLedger(file).close()
    content = file.read_bytes()
    file.write_bytes(content.replace(b"CREATE TABLE blobs", b"CREATE TABLE \xff\xfeobs", 1))
    with pytest.raises(InputError, match="the ledger is damaged"):
        SqliteLedger(file)
    deferred = SqliteLedger(file, required=False)
    with pytest.raises(LedgerError, match="the ledger is damaged"):
        deferred.unsettled()
    file.write_bytes(content)
    assert deferred.unsettled() == (), "it is opened again once it can be"


def test_a_first_start_that_another_one_overtakes_takes_the_tables_that_are_there(file):
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    made = []
    thread = threading.Thread(target=lambda: made.append(SqliteLedger(file, "c").unsettled()))
    thread.start()  # sees an empty file, and waits for the lock
    time.sleep(0.3)
    schema._create_tables(other)
    other.execute("COMMIT")
    thread.join()
    other.close()
    assert made == [()]


def test_a_ledger_is_of_one_cluster_and_one_that_names_none_becomes_its_users(file):
    history(file).ledger.close()  # names no cluster
    SqliteLedger(file, "east").close()
    SqliteLedger(file, "east").close()
    with pytest.raises(InputError, match="this is the ledger of east, not of west"):
        SqliteLedger(file, "west")
    foreign = SqliteLedger(file, "west", required=False)
    cluster = Cluster(ledger=foreign)
    cluster.scored(n1=0.9)
    report = cluster.round()
    assert cluster.levels() == {}, "nothing new without a record"
    assert any("this is the ledger of east" in error for error in report.errors)
