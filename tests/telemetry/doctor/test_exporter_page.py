"""Looking at exporter pages: saved, served, over time, with faults."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from telemetry.collect.series.identity import SeriesCatalogue
from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.exporter_page import Look, judge_looks, observe_file, observe_page, read_lines
from telemetry.errors import InputError
from telemetry.http import Connection
from tests.telemetry.doctor.looks import H100, NOW, labels, page

CATALOGUE_OF_SERIES = SeriesCatalogue(CATALOGUE, default_node="node")
REAL = Path(__file__).resolve().parents[4] / "shared" / "data" / "dcgm-exporter" / "l4-driver-580.prom"


def look(text: str, *, after_s: float = 0.0, elapsed_s: float = 0.1, skew_s: float = 0.0) -> Look:
    lines = read_lines(text.encode(), CATALOGUE_OF_SERIES)
    return Look(lines, NOW + timedelta(seconds=after_s), elapsed_s, skew_s)


def findings(*looks: Look) -> dict[str, bool]:
    return {each.what: each.problem for each in judge_looks(list(looks), "here").findings}


def test_a_whole_page_shows_every_channel_that_dcgm_has() -> None:
    seen = judge_looks([look(page())], "here")
    assert {name for name, channel in CATALOGUE.items() if channel.dcgm_names} <= set(seen.channels)
    assert {each.gpus for each in seen.channels.values()} == {2}
    assert (seen.units, seen.nodes, dict(seen.models)) == (2, 1, {H100: 2})
    assert seen.facts["time stamps on lines"] == "none"


@pytest.mark.skipif(not REAL.exists(), reason="the shared data folder is not here")
def test_the_real_page_is_explained_to_the_last_metric() -> None:
    seen = observe_file(REAL, channels=CATALOGUE, clock=lambda: NOW)
    assert seen.unknown == ()
    assert seen.xid_events is False
    assert len(seen.channels) == 22
    assert dict(seen.models) == {"NVIDIA L4": 1}


def test_sentinels_are_no_values() -> None:
    seen = judge_looks([look(page({"mem_temp_c": 9223372036854775794.0, "gpu_temp_c": 40.0}))], "here")
    assert (seen.channels["mem_temp_c"].gpus, seen.channels["mem_temp_c"].sentinels) == (0, 2)
    assert seen.units == 2
    told = findings(look(page({"mem_temp_c": 9223372036854775794.0, "gpu_temp_c": 40.0})))
    assert told["values that mean not supported are passed on (mem_temp_c); they are read as null"] is False


def test_nan_and_unknown_metrics() -> None:
    more = f"DCGM_FI_DEV_GPU_TEMP{{{labels(0)}}} NaN\nDCGM_FI_DEV_SHINY{{{labels(0)}}} 1\ngo_goroutines 7\n"
    seen = judge_looks([look(page({"power_w": 100.0}, more=more))], "here")
    assert seen.channels["gpu_temp_c"].gpus == 0
    assert seen.unknown == ("DCGM_FI_DEV_SHINY",)


def test_lines_that_are_no_lines_do_not_hide_the_others() -> None:
    told = findings(look(page({"gpu_temp_c": 40.0}, more='DCGM_FI_DEV_POWER_USAGE{gpu="0 12\n')))
    assert any(what.startswith("1 lines are not of the format: ") and problem for what, problem in told.items())


def test_a_page_that_ends_inside_a_line_is_said_so() -> None:
    assert findings(look(page({"gpu_temp_c": 40.0})[:-3]))["the page ends inside a line"] is True


def test_lines_without_a_gpu_point_at_the_mapping() -> None:
    told = findings(look(page({"gpu_temp_c": 40.0}, more='DCGM_FI_DEV_POWER_USAGE{card="0"} 12\n')))
    assert told["1 lines of channels name no GPU or no node"] is True
    with pytest.raises(InputError, match="1 lines have a channel's name but no label that names GPU and node"):
        judge_looks([look('DCGM_FI_DEV_POWER_USAGE{card="0"} 12\n')], "here")


def test_clocks_and_slow_answers() -> None:
    told = findings(look(page(), elapsed_s=7.0, skew_s=-90.0))
    assert told["the exporter's clock is -90 s off ours"] is True
    assert told["the page took 7.0 s"] is True
    assert not any(problem for problem in findings(look(page(), skew_s=2.0)).values())


def test_time_stamps_on_lines() -> None:
    old_ms = int((NOW - timedelta(minutes=20)).timestamp() * 1000)
    seen = judge_looks([look(page(stamp=f" {old_ms}"))], "here")
    assert seen.channels["gpu_temp_c"].age_s == pytest.approx(1200)
    assert seen.facts["time stamps on lines"] == "yes, newest 1,200 s old"
    assert "the newest time stamp on a line is 1,200 s old" in {each.what for each in seen.findings}


def test_watching_tells_the_interval_and_what_never_changes() -> None:
    looks = []
    for turn in range(36):  # a look every 2 s at an exporter that reads every 10 s
        power = 300.0 + turn // 5
        looks.append(look(page({"power_w": power, "gpu_temp_c": 40.0}), after_s=2.0 * turn))
    seen = judge_looks(looks, "here")
    assert seen.facts["exporter's interval"] == "about 10 s"
    assert seen.facts["repeated pages"] == "28 of 35"
    assert (seen.channels["power_w"].constant, seen.channels["gpu_temp_c"].constant) == (False, True)


def test_a_page_that_never_changes_hangs() -> None:
    short = findings(*(look(page(), after_s=2.0 * turn) for turn in range(5)))
    assert short["no value changed within 8 s"] is False
    long = findings(look(page()), look(page(), after_s=70), look(page(), after_s=150))
    assert long["no value changed within 150 s"] is True


def test_amds_exporter_is_known_by_its_names() -> None:
    line = 'gpu_junction_temperature{gpu_id="0",gpu_uuid="abc",serial_number="s",card_model="x",hostname="n1"} 40\n'
    seen = judge_looks([look(line)], "here")
    assert seen.facts["exporter"] == "AMD"
    assert seen.channels["gpu_temp_c"].gpus == 1


def test_a_missing_file_and_a_page_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the page cannot be read: No such file"):
        observe_file(tmp_path / "no.prom", channels=CATALOGUE)
    (tmp_path / "other.prom").write_text("go_goroutines 7\n")
    with pytest.raises(InputError, match="the page holds no series of a GPU") as caught:
        observe_file(tmp_path / "other.prom", channels=CATALOGUE)
    assert "dcgm-exporter or AMD's device-metrics-exporter" in str(caught.value)


class _Exporter(BaseHTTPRequestHandler):
    answers: list[tuple[int, dict[str, str], bytes]]

    def do_GET(self) -> None:
        status, headers, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        return


@contextmanager
def serving(*answers: tuple[int, dict[str, str], bytes]) -> Iterator[str]:
    handler = type("Exporter", (_Exporter,), {"answers": list(answers)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def seen_at(url: str, *, watch_s: float = 0.0) -> dict[str, str]:
    seen = observe_page(
        Connection(url),
        channels=CATALOGUE,
        watch_s=watch_s,
        timeout_s=2.0,
        clock=lambda: NOW,
        sleep=lambda _seconds: None,
    )
    return dict(seen.facts)


def test_a_served_page_tells_its_clock_and_pace() -> None:
    headers = {"Date": format_datetime(NOW + timedelta(seconds=30), usegmt=True)}
    with serving((200, headers, page().encode())) as url:
        facts = seen_at(url, watch_s=6.0)
    assert facts["repeated pages"] == "3 of 3"
    assert facts["clock"].startswith("+30.")


def test_an_exporter_that_restarts_is_asked_again() -> None:
    with serving((503, {}, b"starting"), (200, {}, page().encode())) as url:
        assert seen_at(url)["exporter"] == "NVIDIA"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, {}, b"who are you"), "HTTP status 401: who are you"),
        ((500, {}, b""), "HTTP status 500"),
        (
            (302, {"Location": "http://login.example/sso?next=secret"}, b""),
            "HTTP 302 to http://login.example/sso",
        ),
        ((200, {"Content-Length": "9999"}, b"DCGM"), "no answer"),
    ],
)
def test_answers_that_are_no_page(answer: tuple[int, dict[str, str], bytes], message: str) -> None:
    with serving(answer) as url, pytest.raises(InputError, match=message) as caught:
        seen_at(url)
    assert "secret" not in str(caught.value)


def test_nobody_there() -> None:
    with serving((200, {}, b"")) as url:
        pass
    with pytest.raises(InputError, match=r"no answer: .*refused"):
        seen_at(url)
