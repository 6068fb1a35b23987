"""Looking at exporter pages: saved, served, over time, with faults."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from telemetry.collect.series.identity import SeriesCatalogue
from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.exporter_page import observe_body, observe_file, observe_page
from telemetry.doctor.observation import Observation
from telemetry.errors import InputError
from telemetry.http import Answer, Connection
from tests.http_server import Handler, serving
from tests.telemetry.doctor.looks import H100, NOW, labels, page

SENTINEL = 9223372036854775794.0
ONE = {"gpu_temp_c": 40.0}
OLD = f" {int((NOW - timedelta(minutes=20)).timestamp() * 1000)}"


def look(text: str, *, elapsed_s: float = 0.1, date: datetime = NOW) -> Observation:
    answer = Answer(b"", {"date": format_datetime(date, usegmt=True)}, elapsed_s)
    return observe_body(text.encode(), SeriesCatalogue(CATALOGUE, default_node="node"), "here", NOW, answer)


def test_a_whole_page_shows_every_channel_that_dcgm_has() -> None:
    seen = look(page())
    assert {name for name, channel in CATALOGUE.items() if channel.dcgm_names} <= set(seen.channels)
    assert {each.gpus for each in seen.channels.values()} == {2}
    assert (seen.units, seen.nodes, dict(seen.models)) == (2, 1, {H100: 2})
    assert seen.facts["time stamps on lines"] == "none"


def test_sentinels_are_no_values() -> None:
    seen = look(page({"mem_temp_c": SENTINEL, "gpu_temp_c": 40.0}))
    assert (seen.channels["mem_temp_c"].gpus, seen.channels["mem_temp_c"].sentinels) == (0, 2)
    assert seen.units == 2


def test_nan_and_unknown_metrics() -> None:
    more = f"DCGM_FI_DEV_GPU_TEMP{{{labels(0)}}} NaN\nDCGM_FI_DEV_SHINY{{{labels(0)}}} 1\ngo_goroutines 7\n"
    seen = look(page({"power_w": 100.0}, more=more))
    assert seen.channels["gpu_temp_c"].gpus == 0
    assert seen.unknown == ("DCGM_FI_DEV_SHINY",)


@pytest.mark.parametrize(
    ("text", "answer", "finding", "problem"),
    [
        (page(ONE, more='DCGM_FI_DEV_POWER_USAGE{gpu="0 12\n'), {}, "1 lines are not of the format: ", True),
        (page(ONE)[:-3], {}, "the page ends inside a line", True),
        (
            page(ONE, more='DCGM_FI_DEV_POWER_USAGE{card="0"} 12\n'),
            {},
            "1 lines of channels name no GPU or no node",
            True,
        ),
        (page(), {"date": NOW - timedelta(seconds=90)}, "the exporter's clock is -90 s off ours", True),
        (page(), {"elapsed_s": 7.0}, "the page took 7.0 s", True),
        (page(stamp=OLD), {}, "the newest time stamp on a line is 1,200 s old", True),
        (page({"mem_temp_c": SENTINEL}), {}, "values that mean not supported are passed on (mem_temp_c); they", False),
        (page(ONE), {}, "single XIDs are not reported, only the last one", False),
    ],
)
def test_what_is_amiss_is_found(text: str, answer: dict[str, Any], finding: str, problem: bool) -> None:
    (found,) = (each for each in look(text, **answer).findings if each.what.startswith(finding))
    assert found.problem is problem
    healthy = look(page(), date=NOW + timedelta(seconds=2))
    assert not any(each.problem for each in healthy.findings)


def test_a_page_whose_labels_name_no_gpu_points_at_the_mapping() -> None:
    with pytest.raises(InputError, match="1 lines have a channel's name but no label that names GPU and node"):
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
    with pytest.raises(InputError, match="the page holds no series of a GPU") as caught:
        observe_file(tmp_path / "other.prom", channels=CATALOGUE, now=NOW)
    assert "dcgm-exporter or AMD's device-metrics-exporter" in str(caught.value)


@contextmanager
def exporter(*answers: tuple[int, dict[str, str], bytes]) -> Iterator[str]:
    """Give these answers; the last one stays."""
    left = list(answers)

    class Exporter(Handler):
        def do_GET(self) -> None:
            status, headers, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True

    with serving(Exporter) as address:
        yield f"{address}/metrics"


def seen_at(url: str) -> dict[str, str]:
    return dict(observe_page(Connection(url), channels=CATALOGUE, timeout_s=30.0, now=NOW).facts)


def test_a_served_page_tells_its_clock() -> None:
    headers = {"Date": format_datetime(NOW + timedelta(seconds=300), usegmt=True)}
    with exporter((200, headers, page().encode())) as url:
        assert seen_at(url)["clock"].startswith(("+300.", "+299.", "+298."))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, {}, b"who are you"), "HTTP status 401: who are you"),
        (
            (302, {"Location": "http://login.example/sso?next=secret"}, b""),
            "HTTP 302 to http://login.example/sso",
        ),
        ((200, {"Content-Length": "9999"}, b"DCGM"), "no answer"),
    ],
)
def test_answers_that_are_no_page(answer: tuple[int, dict[str, str], bytes], message: str) -> None:
    with exporter(answer) as url, pytest.raises(InputError, match=message) as caught:
        seen_at(url)
    assert "secret" not in str(caught.value)
