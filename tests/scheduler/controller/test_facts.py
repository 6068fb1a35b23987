"""Facts from the events of a dataset."""

from datetime import timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.fleet import Fact
from policy.node_tier.hard_rules import RULES, HardRule, HardRulesConfig, reported
from scheduler.controller.facts import EventFacts
from scheduler.ports.errors import SourceError
from scheduler.ports.risks import ReportedFacts
from telemetry.dataset.schema import EVENT_RUNS, EVENTS
from telemetry.kernel_log.catalogue import parse_xid_message
from tests.policy.decide_world import HOUR, T0


def write(file, *events):
    rows = [
        {
            "timestamp": at, "node": "n", "gpu": gpu, "type": kind, "code": code, "source": "s",
            "detail": detail[0] if detail else None, "known_at": at + HOUR / 6,
        }
        for at, gpu, kind, code, *detail in events
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows, schema=EVENTS), file)


def test_events_that_rules_name_are_facts_and_a_repair_voids_what_was_before(tmp_path):
    file = tmp_path / "events.parquet"
    write(
        file,
        (T0, "a", "xid", "79"), (T0, "a", "xid", "31"), (T0, None, "xid", "79"), (T0, "b", "diagnostic", "fail"),
        (T0, "b", "diagnostic", "inconclusive"), (T0 + HOUR, "b", "repair", "x"), (T0, "c", "diagnostic", "pass"),
        (T0 - 400 * HOUR, "d", "xid", "79"), (T0, "e", "drain", "fail"),
    )  # fmt: skip
    assert EventFacts(file).read(T0 + 2 * HOUR) == {
        "a": ReportedFacts((Fact("xid 79", T0),)),
        "b": ReportedFacts((Fact("diagnostic_failed", T0),), T0 + HOUR),
        "c": ReportedFacts((), T0),
    }
    assert EventFacts(file).read(T0) == {}, "nothing is known before it was"
    rules = HardRulesConfig((HardRule("xid 31", "elevated", HOUR, "a fault of memory paging"),))
    assert EventFacts(file, rules).read(T0 + HOUR / 2) == {
        "a": ReportedFacts((Fact("xid 31", T0),)), "c": ReportedFacts((), T0)
    }  # fmt: skip
    assert EventFacts(file, rules).read(T0 + 2 * HOUR)["b"] == ReportedFacts((), T0 + HOUR)


@pytest.mark.parametrize("column", ["timestamp", "known_at", "last_at"])
@pytest.mark.parametrize("value", [2**62, -(2**62), 253_402_300_800_000])
def test_an_instant_that_is_none_costs_its_own_event_and_is_counted(tmp_path, column, value):
    file = tmp_path / "events.parquet"
    row = {
        "timestamp": T0, "node": "n", "gpu": "a", "type": "xid", "code": "79", "detail": None, "source": "s",
        "known_at": T0, "last_at": None, "count": None,
    }  # fmt: skip
    table = pa.Table.from_pylist([{**row, "gpu": "b"}, row], schema=EVENT_RUNS)
    place = table.schema.get_field_index(column)
    kind = table.schema.field(column).type
    good = [None if row[column] is None else int(row[column].timestamp() * 1000)]
    values = pa.array([*good, value], pa.int64()).cast(kind)
    pq.write_table(table.set_column(place, column, values), file)
    facts = EventFacts(file)
    assert facts.read(T0 + HOUR) == {"b": ReportedFacts((Fact("xid 79", T0),))}
    assert facts.unreadable_events == 1


@pytest.mark.parametrize("kind", [pa.int64(), pa.int32(), pa.float64(), pa.dictionary(pa.int32(), pa.string())])
def test_a_code_of_another_type_is_read(tmp_path, kind):
    file = tmp_path / "events.parquet"
    write(file, (T0, "a", "xid", "79"))
    table = pq.read_table(file)
    values = pa.array(["79"]).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array([79], kind)
    pq.write_table(table.set_column(table.schema.get_field_index("code"), "code", values), file)
    assert EventFacts(file).read(T0 + HOUR) == {"a": ReportedFacts((Fact("xid 79", T0),))}


RESET = parse_xid_message(
    "NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
).detail
SECONDS = st.integers(0, 300)
FLOODS = st.lists(
    st.tuples(SECONDS, st.sampled_from("ab"), st.sampled_from(["79", "48", "154", " 79 "]), st.booleans()), max_size=25
)


@given(FLOODS, SECONDS)
@settings(max_examples=60)
def test_of_a_flood_enough_is_kept_to_say_the_same_as_all_of_it(tmp_path_factory, events, moment):
    file = tmp_path_factory.getbasetemp() / "flood.parquet"
    rows = [(T0 + timedelta(seconds=at), gpu, "xid", code, RESET if reset else "") for at, gpu, code, reset in events]
    write(file, *rows)
    source, every = EventFacts(file), pq.read_table(file).to_pylist()
    later = T0 + 2 * HOUR
    found = {unit: (set(facts.facts), facts.valid_from) for unit, facts in source.read(later).items()}
    assert found == {unit: (set(facts), void) for unit, (facts, void) in reported(every, later).items()}
    if any(reset for *_, reset in events):
        return
    now = T0 + HOUR / 6 + timedelta(seconds=moment)  # some are known, and of some minutes only the beginning
    names = {unit: {fact.name for fact in facts.facts} for unit, facts in source.read(now).items()}
    assert names == {unit: {fact.name for fact in facts} for unit, (facts, _) in reported(every, now).items()}


def test_what_is_known_first_of_a_minute_is_said_though_the_rest_of_it_comes_a_day_later(tmp_path):
    file = tmp_path / "events.parquet"
    write(file, *((T0 + timedelta(seconds=at), "a", "xid", "79") for at in (0, 10, 20)))
    rows = pq.read_table(file).to_pylist()
    late = [row | {"known_at": row["known_at"] + 24 * HOUR * (number != 1)} for number, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(late, schema=EVENTS), file)
    assert EventFacts(file).read(T0 + HOUR) == {"a": ReportedFacts((Fact("xid 79", T0 + timedelta(seconds=10)),))}


def test_of_thousands_of_lines_of_one_xid_a_few_a_minute_are_kept(tmp_path):
    file = tmp_path / "events.parquet"
    flood = [
        (T0 + timedelta(milliseconds=100 * step), "a", "xid", code) for step in range(3000) for code in ("79", "31")
    ]
    write(file, *flood)
    source = EventFacts(file)
    assert source.read(T0 + HOUR)["a"].facts[-1] == Fact("xid 79", flood[-2][0])
    assert len(source._rows) <= 4 * 6


def test_a_boot_of_its_node_ends_what_a_restart_cures(tmp_path):
    file = tmp_path / "events.parquet"
    write(file, (T0, "a", "xid", "79"), (T0, "b", "diagnostic", "fail"), (T0 + HOUR, None, "other", "boot"))
    assert set(EventFacts(file).read(T0 + HOUR)) == {"a", "b"}
    assert set(EventFacts(file).read(T0 + 2 * HOUR)) == {"b"}


def test_a_maintenance_in_the_events_is_its_nodes(tmp_path):
    file = tmp_path / "events.parquet"
    until = T0 + 3 * HOUR
    write(file, (T0, None, "maintenance", until.isoformat()), (T0, "a", "xid", "79"))
    assert EventFacts(file).read(T0 + HOUR) == {
        "n": ReportedFacts(planned=((T0, until),)),
        "a": ReportedFacts((Fact("xid 79", T0),)),
    }


def test_a_run_of_events_was_seen_at_its_last_one(tmp_path):
    def run(gpu, first, last, code, detail=None):
        return {
            "timestamp": first, "node": "n", "gpu": gpu, "type": "xid", "code": code, "detail": detail, "source": "s",
            "known_at": T0, "last_at": last, "count": 2,
        }  # fmt: skip

    def recovery(change):
        message = parse_xid_message(f"NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from {change}")
        return message.code, message.detail

    rows = [
        run("long", T0 - 400 * HOUR, T0, "79"),
        run("single", T0, None, "79"),
        run("wrong clock", T0, T0 + 9 * HOUR, "79"),
        run("asked again", T0 - 2 * HOUR, T0, *recovery("0x0 (None) to 0x2 (Node Reboot Required)")),
        run("asked again", T0 - HOUR, T0 - HOUR / 2, *recovery("0x2 (Node Reboot Required) to 0x0 (None)")),
    ]
    repair = {**run("long", T0 - HOUR, None, "x"), "type": "repair"}
    file = tmp_path / "events.parquet"
    pq.write_table(pa.Table.from_pylist([*rows, repair], schema=EVENT_RUNS), file)
    assert EventFacts(file).read(T0 + HOUR) == {
        "asked again": ReportedFacts((Fact("recovery_action reboot", T0),)),
        "long": ReportedFacts((Fact("xid 79", T0),), T0 - HOUR),
        "single": ReportedFacts((Fact("xid 79", T0),)),
        "wrong clock": ReportedFacts((Fact("xid 79", T0),)),
    }


def test_the_newest_recovery_action_that_the_driver_announced_is_a_fact_until_it_is_taken_back(tmp_path):
    def announced(text):
        message = parse_xid_message(f"NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from {text}")
        return "xid", message.code, message.detail

    file = tmp_path / "events.parquet"
    write(
        file,
        (T0, "a", *announced("0x0 (None) to 0x4 (Drain and Reset)")),
        (T0 + HOUR, "a", *announced("0x4 (Drain and Reset) to 0x1 (GPU Reset Required)")),
        (T0, "b", *announced("0x0 (None) to 0x2 (Node Reboot Required)")),
        (T0 + HOUR, "b", *announced("0x2 (Node Reboot Required) to 0x0 (None)")),
        (T0, "c", *announced("0x0 (None) to 0x3 (Drain P2P)")),
        (T0, "d", *announced("0x0 (None) to 0x9 (of a driver to come)")), (T0, "e", "xid", "154"),
    )  # fmt: skip
    result = EventFacts(file).read(T0 + 2 * HOUR)
    assert result == {
        "a": ReportedFacts((Fact("recovery_action reset", T0 + HOUR),)),
        "c": ReportedFacts((Fact("recovery_action drain_p2p", T0),)),
    }
    assert {rule.fact for rule in RULES} >= {fact.name for item in result.values() for fact in item.facts}
    assert EventFacts(file).read(T0 + HOUR / 2)["b"] == ReportedFacts((Fact("recovery_action reboot", T0),))


def test_the_file_is_read_again_when_it_was_replaced(tmp_path):
    file = tmp_path / "events.parquet"
    source = EventFacts(file)
    with pytest.raises(SourceError, match=r"the events in .*events\.parquet cannot be read"):
        source.read(T0)
    write(file, (T0, "a", "xid", "79"))
    assert set(source.read(T0 + HOUR)) == {"a"}
    other = tmp_path / "other"
    write(other, (T0, "a", "xid", "79"), (T0, "b", "xid", "95"))
    other.replace(file)
    assert set(source.read(T0 + HOUR)) == {"a", "b"}
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.schema.get_field_index("known_at"), "known_at", pa.nulls(2)), file)
    with pytest.raises(SourceError, match="known_at"):
        source.read(T0 + HOUR)
    file.write_text("nonsense")
    with pytest.raises(SourceError, match="cannot be read"):
        source.read(T0 + HOUR)
