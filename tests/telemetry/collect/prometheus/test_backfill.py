"""The backfill against a fake server, and its verb: every sample once, whatever the server's rules and limits."""

import json
import shutil
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from foundation.errors import InputError
from telemetry.accounting import Accounting
from telemetry.collect.prometheus.client import Bounds
from telemetry.collect.series.batch import SENTINEL
from telemetry.collect.series.mapping import SourceMapping
from telemetry.dataset.store import Dataset
from tests.processes import invoke
from tests.telemetry.collect.prometheus.fake_prometheus import (
    HOUR_MS,
    START,
    START_MS,
    TEMPERATURE,
    XIDS,
    Asked,
    FakePrometheus,
    Reply,
    Site,
    fill,
    gpu_labels,
    staged,
    values_of,
)


# VictoriaMetrics leaves out a block that begins where the query ends: open to the right for some series, by chance.
@pytest.mark.parametrize(
    ("left_open", "right_open"), [(False, False), (True, False), (True, True)], ids=["closed", "left-open", "open"]
)
def test_each_sample_counts_once_whatever_the_servers_rule_at_the_bounds(site, left_open, right_open):
    site.fake.left_open, site.fake.right_open = left_open, right_open
    expected = fill(site.fake)
    result = site.fetch()
    assert site.values() == expected
    assert set(site.values("pcie_replay_total").values()) <= {2.0**40 + place for place in range(40)}
    assert {START_MS, START_MS + 6 * HOUR_MS} <= {ms for _, ms in expected}
    assert (result["chunks"], result["rows"], result["samples"]) == (6, len(expected), 2 * len(expected))
    assert all("query_range" not in asked.path for asked in site.fake.asked)


def test_a_finished_backfill_asks_for_no_sample_again_and_a_longer_one_only_for_what_is_new(site: Site) -> None:
    expected = fill(site.fake)
    site.fetch(end=START + timedelta(hours=4, minutes=30))
    before = len(site.fake.queries())
    again = site.fetch(end=START + timedelta(hours=4, minutes=30))
    assert (len(site.fake.queries()), again["samples"], again["chunks fetched before"]) == (before, 0, 5)
    site.fetch()
    assert len(site.fake.queries()) == before + 2 * 2
    assert site.values() == expected


def test_chunks_are_halved_where_the_server_refuses_and_the_size_is_remembered(site: Site) -> None:
    expected = fill(site.fake)
    site.fake.max_samples = 10  # an hour holds 18
    site.fetch(concurrency=1)
    assert site.values() == expected
    hour = [query for query in site.fake.queries() if query.endswith("[3600000ms]") or query.endswith("[3600001ms]")]
    assert len(hour) <= 2 + 2  # once a metric, not once a chunk; the first chunk is a millisecond longer


def test_a_minute_that_is_refused_is_an_error(site: Site) -> None:
    site.fake.add(TEMPERATURE, gpu_labels(0), [(START_MS + 1, 40.0)])
    site.fake.max_samples = 0
    with pytest.raises(InputError, match=rf"too many samples .*metric {TEMPERATURE}.*--query\.max-samples.*by --match"):
        site.fetch()


@pytest.mark.parametrize(
    "bound",
    [{"max_samples": 20}, {"bounds": Bounds(request_s=60, body_bytes=1200)}],
    ids=["samples of a span", "bytes of an answer"],
)
def test_spans_are_cut_so_that_memory_is_bounded(site: Site, tmp_path: Path, bound: dict[str, object]) -> None:
    expected = fill(site.fake)
    site.fetch(**bound)
    frames = [pq.read_table(path) for path in (tmp_path / "fleet.live" / "samples").glob("*.parquet")]
    assert site.values() == expected
    assert max(frame.num_rows for frame in frames) <= 20


def test_every_sample_is_accounted_for(site: Site) -> None:
    expected = fill(site.fake, gpus=2)
    site.fake.add(TEMPERATURE, {"job": "bare"}, [(START_MS + 5, 1.0), (START_MS + 6, 2.0)])
    site.fake.add(TEMPERATURE, gpu_labels(9), [(START_MS + 7, 9223372036854775794.0)])
    accounting = Accounting()
    site.fetch(accounting=accounting)
    account = accounting.tables["sample values"]
    assert account.left_out == {f"{TEMPERATURE}: its labels do not name a GPU and a node": 2, SENTINEL: 1}
    assert (account.used, account.unaccounted) == (2 * len(expected), 0)


def test_recording_rules_come_through_the_mapping(site: Site) -> None:
    labels = {"device_uuid": "GPU-1", "kubernetes_node": "n1.cluster.example:9400"}
    site.fake.add("job:gpu_power_mw:max", labels, [(START_MS + 1, 250_000.0)])
    with pytest.raises(InputError, match=r"job:gpu_power_mw:max.*--mapping"):
        site.fetch()
    known = {"metrics": {"job:gpu_power_mw:max": "power_w"}, "scale": {"power_w": 0.001}}
    with pytest.raises(
        InputError, match=r"device_uuid, kubernetes_node .*gpu: \[device_uuid\], node: \[kubernetes_node\]"
    ):
        site.fetch(mapping=SourceMapping.model_validate(known))
    named = {**known, "labels": {"gpu": ["device_uuid"], "node": ["kubernetes_node"]}}
    site.fetch(mapping=SourceMapping.model_validate(named))
    frame = site.staged()
    assert values_of(frame, "power_w") == {("GPU-1", START_MS + 1): 250.0}
    assert set(frame["node"]) == {"n1.cluster.example"}


def test_matchers_narrow_everything_that_is_asked(site: Site) -> None:
    fill(site.fake, gpus=2)
    site.fake.add(TEMPERATURE, {**gpu_labels(9), "job": "other"}, [(START_MS + 5, 1.0)])
    site.fetch(match='{job="other"}')
    assert site.values() == {(gpu_labels(9)["UUID"], START_MS + 5): 1.0}
    with pytest.raises(InputError, match="'job=1' is not a list of matchers"):
        site.fetch(match="job=1")
    with pytest.raises(InputError, match=r"the server has no metrics in this period \(--match \{job=\"none\"\}\)"):
        site.fetch(match='{job="none"}')


@pytest.mark.parametrize("key", ["warnings", "errors"])
def test_partial_answers_are_a_failure_unless_allowed(site: Site, key: str) -> None:
    expected = fill(site.fake)
    site.fake.warns_in = key

    def one_store_down(asked: Asked) -> Reply | None:
        site.fake.warnings = ["store 2 is down"] if "query" in asked.parameters else []
        return None

    site.fake.fault = one_store_down
    with pytest.raises(InputError, match=r"incomplete: store 2 is down.*--allow-partial"):
        site.fetch()
    assert {asked.parameters["partial_response"] for asked in site.fake.asked} == {"false"}
    site.fetch(allow_partial=True)
    assert site.values() == expected


def test_the_newest_two_minutes_are_left_for_later(site: Site) -> None:
    site.fake.add(TEMPERATURE, gpu_labels(0), [(START_MS + place * 60_000, 40.0) for place in range(60)])
    result = site.fetch(now=START + timedelta(minutes=30))
    assert result["until"] == (START + timedelta(minutes=28)).isoformat()
    assert "the newest two minutes" in result["left out"]
    assert len(site.staged()) == 29
    site.fetch(now=START + timedelta(hours=2))
    assert len(site.values()) == 60
    with pytest.raises(InputError, match=r"2026-01-01T.* to 2025-12-31T23:58.*Start earlier"):
        site.fetch(now=START)


def test_rising_xid_counts_are_events_and_the_first_sight_is_none(site: Site) -> None:
    minutes = [START_MS + place * 60_000 for place in range(240)]
    site.fake.add(TEMPERATURE, gpu_labels(0), [(ms, 40.0) for ms in minutes])
    # There before we look: not an event. One more, over the bound of two chunks: one.
    site.fake.add(
        XIDS, gpu_labels(0, xid="31"), [(ms, 1.0 if ms <= START_MS + HOUR_MS else 2.0) for ms in minutes[:90]]
    )
    # New while the GPU is watched: an event, and again after it had left the exporter's window.
    site.fake.add(XIDS, gpu_labels(0, xid="79"), [(ms, 1.0) for ms in (*minutes[100:105], *minutes[200:205])])
    site.fake.add(XIDS, gpu_labels(0, xid="0"), [(ms, float(ms % 7)) for ms in minutes])
    result = site.fetch(delay=timedelta(minutes=7))
    events = site.staged("events").sort_values("timestamp")
    at = [START + timedelta(minutes=place) for place in (61, 100, 200)]
    assert list(zip(events["code"], events["timestamp"], strict=True)) == list(zip(("31", "79", "79"), at, strict=True))
    assert list(events["known_at"]) == [instant + timedelta(minutes=7) for instant in at]
    assert set(events["type"]) == {"xid"}
    assert set(events["node"]) == {"node00"}
    assert result["XID count rises"] == 3


def test_a_chunk_too_short_and_a_time_without_history_are_refused(site: Site) -> None:
    with pytest.raises(InputError, match=r"5 s is too short \(--chunk\). Give at least 1m."):
        site.fetch(chunk=timedelta(seconds=5))
    with pytest.raises(InputError, match=r"the period from .* is empty.* Give an end after the start."):
        site.fetch(end=START - timedelta(hours=1))


def collect(fake: FakePrometheus, dataset: Path, *options: str, code: int = 0) -> str:
    """Run the verb, where no params.yaml of the checkout is; returns everything it wrote."""
    span = ("--since", "2026-01-01T00:00:00Z", "--until", "2026-01-01T06:00:00+00:00")
    words = ("collect", "prometheus", "--prometheus", fake.url, *span, "--dataset", dataset, *options)
    return invoke(*words, cwd=dataset.parent, code=code).output


def test_one_command_makes_a_dataset_and_a_second_adds_nothing(fake: FakePrometheus, tmp_path: Path) -> None:
    expected = fill(fake, step_ms=600_000)
    report = json.loads(collect(fake, tmp_path / "fleet", "--json", "--chunk", "2h").splitlines()[-1])
    assert (report["chunks"], report["metrics"]) == (3, 2)
    assert (report["rows"], report["samples"]) == (len(expected), 2 * len(expected))
    dataset = Dataset.open(tmp_path / "fleet")
    assert dataset.meta.counts["samples"] == len(expected)
    assert set(dataset.inventory()["driver"]) == {"570.1"}
    assert "chunks fetched before  3" in collect(fake, tmp_path / "fleet", "--chunk", "2h")
    assert Dataset.open(tmp_path / "fleet").digest == dataset.digest


def test_what_is_fetched_can_be_left_for_later(fake: FakePrometheus, tmp_path: Path) -> None:
    expected = fill(fake)
    collect(fake, tmp_path / "fleet", "--no-compact")
    assert not (tmp_path / "fleet").exists()
    assert len(staged(tmp_path)) == len(expected)


def test_a_dataset_that_was_removed_is_reported(fake: FakePrometheus, tmp_path: Path) -> None:
    fill(fake)
    collect(fake, tmp_path / "fleet")
    shutil.rmtree(tmp_path / "fleet")
    text = collect(fake, tmp_path / "fleet", code=1)
    assert "history was fetched before, but the dataset does not exist" in text
    assert "fleet.live as well to fetch everything again." in text
