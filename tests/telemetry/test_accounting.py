"""Counts of what was read and what became of it: as a table, in JSON and as metrics."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from telemetry.accounting import Accounting, as_text, metrics


@pytest.fixture
def accounting() -> Accounting:
    made = Accounting()
    made.read("events", 10)
    made.used("events", 6)
    made.left_out("events", "unknown node", 3, "tickets.csv, row 2")
    made.waiting("events", "unknown gpu", 1)
    return made


def test_the_sums_of_parts_are_those_of_the_whole(accounting: Accounting) -> None:
    whole = Accounting()
    whole.add(accounting)
    whole.add(accounting)
    account = whole.tables["events"]
    assert (account.read, account.used, account.left_out.total(), account.waiting.total()) == (20, 12, 6, 2)
    assert account.unaccounted == 0


def test_the_table_names_each_reason_with_its_example(accounting: Accounting) -> None:
    lines = as_text(accounting).splitlines()
    assert lines[1].split() == ["events", "10", "6", "3", "1"]
    assert lines[2] == "  left out: 3 unknown node, such as tickets.csv, row 2"
    assert lines[3] == "  waiting for: 1 unknown gpu"
    accounting.read("events", 1)
    assert "unaccounted: 1" in as_text(accounting)


def test_a_running_collector_exposes_the_counts(accounting: Accounting) -> None:
    class Exposed:
        def collect(self):
            yield from metrics(accounting)

    registry = CollectorRegistry()
    registry.register(Exposed())
    page = generate_latest(registry).decode()
    assert 'predrain_ingest_read_total{table="events"} 10.0' in page
    assert 'predrain_ingest_left_out_total{reason="unknown node",table="events"} 3.0' in page
    assert 'predrain_ingest_waiting{reason="unknown gpu",table="events"} 1.0' in page
