"""Looking at exporter pages and a Prometheus: what is counted, what is amiss."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from foundation.durations import format_duration
from foundation.errors import InputError
from foundation.http import Connection
from foundation.instants import to_ms
from telemetry.collect.series.batch import NO_NUMBER
from telemetry.collect.series.exposition import parse_line
from telemetry.collect.series.identity import SeriesCatalogue
from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.diagnosis import Observation
from telemetry.doctor.series_source import observe_body, observe_file, observe_page, observe_prometheus
from tests.http_server import Handler, serving
from tests.telemetry.collect.prometheus.fake_prometheus import HOUR_MS, FakePrometheus, gpu_labels
from tests.telemetry.collect.prometheus.fake_prometheus import serving as serving_prometheus
from tests.telemetry.doctor.looks import H100, NOW, labels, page

SENTINEL = 9223372036854775794.0
ONE = {"gpu_temp_c": 40.0}
OLD = f" {int((NOW - timedelta(minutes=20)).timestamp() * 1000)}"


def look(text: str) -> Observation:
    return observe_body(text.encode(), SeriesCatalogue(CATALOGUE, default_node="node"), "here", NOW)


def test_a_whole_page_shows_every_channel_that_dcgm_has() -> None:
    seen = look(page())
    assert {name for name, channel in CATALOGUE.items() if channel.dcgm_names} <= set(seen.channels)
    assert {channel.gpus for channel in seen.channels.values()} == {2}
    assert (seen.units, seen.nodes, dict(seen.models)) == (2, 1, {H100: 2})


def test_nan_and_unknown_metrics() -> None:
    more = f"DCGM_FI_DEV_GPU_TEMP{{{labels(0)}}} NaN\nDCGM_FI_DEV_SHINY{{{labels(0)}}} 1\ngo_goroutines 7\n"
    seen = look(page({"power_w": 100.0}, more=more))
    assert seen.channels["gpu_temp_c"].gpus == 0
    account = seen.accounting.tables["sample values"]
    assert (account.read, account.used) == (5, 2)
    shiny, go = "DCGM_FI_DEV_SHINY: no channel", "go_goroutines: known, and not used"
    assert account.left_out == {NO_NUMBER: 1, shiny: 1, go: 1}
    assert seen.unknown == ("DCGM_FI_DEV_SHINY",)


@pytest.mark.parametrize(
    ("text", "finding", "problem"),
    [
        (page(ONE, more='DCGM_FI_DEV_POWER_USAGE{gpu="0 12\n'), "1 malformed line: ", True),
        (page(ONE)[:-3], "the page is truncated", True),
        (
            "".join(page(ONE).replace("{", f'{{instance="10.0.0.{n}:9400",') for n in (1, 2)),
            "several targets report 2 GPUs, such as",
            True,
        ),
        (
            page(ONE, more='DCGM_FI_DEV_POWER_USAGE{card="0"} 12\n'),
            "1 line of known channels without labels that name a GPU and a node",
            True,
        ),
        (page(stamp=OLD), "the newest timestamp in the page is 1,200 s old", True),
        (page({"mem_temp_c": SENTINEL}), "values that mean not supported are passed on (mem_temp_c); they", False),
        (page(ONE), "only the last XID is reported, not each one", False),
    ],
)
def test_what_is_amiss_is_found(text: str, finding: str, problem: bool) -> None:
    (match,) = (candidate for candidate in look(text).findings if candidate.what.startswith(finding))
    assert match.problem is problem
    assert not any(finding.problem for finding in look(page()).findings)


def test_a_page_whose_labels_name_no_gpu_points_at_the_mapping() -> None:
    with pytest.raises(InputError, match="1 line of known channels without labels"):
        look('DCGM_FI_DEV_POWER_USAGE{card="0"} 12\n')


def test_amds_exporter_is_known_by_its_names() -> None:
    line = 'gpu_junction_temperature{gpu_id="0",gpu_uuid="abc",serial_number="s",card_model="x",hostname="n1"} 40\n'
    seen = look(line)
    assert seen.facts["exporter"] == "AMD"
    assert seen.channels["gpu_temp_c"].gpus == 1


def test_a_missing_file_and_a_page_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the page cannot be read: No such file"):
        observe_file(tmp_path / "no.prom", channels=CATALOGUE, now=NOW)
    (tmp_path / "other.prom").write_text("go_goroutines 7\n")
    with pytest.raises(InputError, match=r"no series of a GPU.*device-metrics-exporter"):
        observe_file(tmp_path / "other.prom", channels=CATALOGUE, now=NOW)


def seen_at(*answer: Any) -> Observation:
    """Look at a server that always replies so."""

    class Exporter(Handler):
        def do_GET(self) -> None:
            self.reply(*answer)
            self.close_connection = True

    with serving(Exporter) as url:
        return observe_page(Connection(f"{url}/metrics"), channels=CATALOGUE, timeout_s=30.0, now=NOW)


def test_a_page_is_fetched() -> None:
    assert seen_at(200, page().encode()).units == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, b"who are you"), "HTTP status 401: who are you"),
        ((302, b"", {"Location": "http://login.example/sso?next=secret"}), "HTTP 302 to http://login.example/sso"),
        ((200, b"DCGM", {"Content-Length": "9999"}), "no response"),
    ],
)
def test_answers_that_are_no_page(answer: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        seen_at(*answer)
    assert "secret" not in str(caught.value)


def ask_prometheus(text: str, *stopped: str, every: timedelta = timedelta(seconds=30), down: int = 0) -> Observation:
    """Look at a server that has the series of a page, up to now, and further metrics until three hours ago."""
    server, now_ms, every_ms = FakePrometheus(), to_ms(NOW), every // timedelta(milliseconds=1)
    server.targets_down = down
    for sample in filter(None, map(parse_line, text.splitlines())):
        times = range(now_ms - 10 * every_ms, now_ms, every_ms)
        server.add(sample.name, {"job": "dcgm", **sample.labels}, [(ms, sample.value) for ms in times])
    for name in stopped:
        server.add(name, gpu_labels(0), [(now_ms - hours * HOUR_MS, 1.0) for hours in range(3, 6)])
    with serving_prometheus(server) as url:
        return observe_prometheus(Connection(url), channels=CATALOGUE, now=NOW)


@pytest.mark.parametrize("every", [timedelta(seconds=15), timedelta(minutes=30)])
def test_a_server_is_looked_at_as_a_page_is(every: timedelta) -> None:
    text = page() + f"DCGM_EXP_XID_ERRORS_COUNT{{{labels(0)}}} 1\n"
    seen = ask_prometheus(text, "DCGM_FI_DEV_SHINY", "node_load1", every=every)
    whole = look(text)
    assert (seen.units, seen.nodes, seen.models, seen.xid_events) == (2, 1, {H100: 2}, True)
    assert seen.channels == whole.channels
    assert (seen.findings, seen.unknown) == ((), ("DCGM_FI_DEV_SHINY",))
    assert seen.facts["sampling interval"] == format_duration(every)


def test_what_stopped_and_targets_that_are_down_are_findings() -> None:
    every, stopped = timedelta(minutes=30), ("DCGM_FI_DEV_POWER_USAGE", "DCGM_EXP_XID_ERRORS_COUNT")
    seen = ask_prometheus(page(ONE), *stopped, every=every, down=12)
    assert [finding.what for finding in seen.findings] == [
        "power_w stopped within the last day",
        "12 targets of the exporters' jobs are down",
    ]
    assert seen.channels["power_w"].gpus == 0
    old = ask_prometheus("", "DCGM_FI_DEV_POWER_USAGE")
    assert "the newest sample is 10,680 s old" in [finding.what for finding in old.findings]


@pytest.mark.parametrize(("gone_hours", "doubled"), [(0, True), (2, False)])
def test_an_exporter_that_restarted_at_another_address_is_one_target(gone_hours: int, doubled: bool) -> None:
    server, now_ms = FakePrometheus(), to_ms(NOW)
    for target, last_ms in (("10.0.0.1:9400", now_ms - gone_hours * HOUR_MS), ("10.0.0.2:9400", now_ms)):
        samples = [(ms, 50.0) for ms in range(now_ms - 20 * HOUR_MS, last_ms, 300_000)]
        server.add("DCGM_FI_DEV_GPU_TEMP", {**gpu_labels(0), "instance": target}, samples)
    with serving_prometheus(server) as url:
        seen = observe_prometheus(Connection(url), channels=CATALOGUE, now=NOW)
    assert any("several targets" in finding.what for finding in seen.findings) == doubled
