"""Looking at a Prometheus: what servers refuse and answer wrongly. tests/system has the real one."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor import prometheus_source
from telemetry.doctor.groups import counter_name
from telemetry.doctor.prometheus_source import Questions, observe_prometheus
from telemetry.errors import InputError
from telemetry.http import Answer, Connection, HttpError
from tests.telemetry.doctor.looks import NOW

NAMES = [name for channel in CATALOGUE.values() if (name := counter_name(channel))]
Reply = Callable[[str], list[tuple[dict[str, str], float]]]


def everything(query: str) -> list[tuple[dict[str, str], float]]:
    """Answer as a server would whose 3 GPUs have every metric, with nothing amiss."""
    if query.startswith("count by (__name__)"):
        names = re.findall(r"[A-Z]+_[A-Z0-9_]+", query)
        return [] if ">=" in query else [({"__name__": name}, 3.0) for name in dict.fromkeys(names)]
    canned: list[tuple[str, list[tuple[dict[str, str], float]]]] = [
        ("count by (job)", [({"job": "dcgm"}, 3.0)]),
        ("count(up", []),
        ("count by (modelName)", [({"modelName": "NVIDIA H100 80GB HBM3"}, 3.0)]),
        ("count(count by", [({}, 3.0)]),
    ]
    return next((answer for start, answer in canned if query.startswith(start)), [({}, 1.0)])


def serve(monkeypatch: pytest.MonkeyPatch, reply: Reply, names: list[str] | None = None) -> list[str]:
    asked: list[str] = []

    def fetch(_connection: Connection, path: str, *, form: Mapping[str, str] | None, **_more: Any) -> Answer:
        data: Any = NAMES if names is None else names
        if form is not None:
            asked.append(form["query"])
            data = {"result": [{"metric": labels, "value": [0, str(value)]} for labels, value in reply(form["query"])]}
        return Answer(json.dumps({"status": "success", "data": data}).encode(), {}, 0.01)

    monkeypatch.setattr(prometheus_source, "fetch", fetch)
    return asked


def questions() -> Questions:
    return Questions(Connection("http://prometheus:9090"), "", NOW)


def test_a_server_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = serve(monkeypatch, everything)
    seen = observe_prometheus(questions(), channels=CATALOGUE)
    assert (seen.units, seen.nodes) == (3, 3)
    assert {each.gpus for each in seen.channels.values()} == {3}
    assert seen.findings == ()
    assert len(asked) < len(NAMES)


def test_targets_that_are_down_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, lambda query: [({}, 12.0)] if "== 0" in query else everything(query))
    told = [each.what for each in observe_prometheus(questions(), channels=CATALOGUE).findings]
    assert told == ["12 targets of the exporters' jobs are down"]


def test_single_xids_are_known_by_the_exporters_own_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, everything, [*NAMES, "DCGM_EXP_XID_ERRORS_COUNT", "DCGM_FI_DEV_SHINY", "node_load1"])
    seen = observe_prometheus(questions(), channels=CATALOGUE)
    assert seen.xid_events is True
    assert seen.unknown == ("DCGM_FI_DEV_SHINY",)


def test_credentials_that_do_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(_query: str) -> list[tuple[dict[str, str], float]]:
        raise HttpError("HTTP status 403: forbidden", status=403)

    serve(monkeypatch, locked)
    with pytest.raises(InputError) as caught:
        observe_prometheus(questions(), channels=CATALOGUE)
    assert str(caught.value) == (
        "HTTP status 403: forbidden (http://prometheus:9090). Check the credentials and --match."
    )


@pytest.mark.parametrize("body", [b"<html>log in</html>", b'{"status": "error"}', b"[]", b'{"status": "success"}'])
def test_answers_of_something_else(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr(prometheus_source, "fetch", lambda *_given, **_more: Answer(body, {}, 0.01))
    with pytest.raises(InputError, match="the answer is not of Prometheus' API"):
        observe_prometheus(questions(), channels=CATALOGUE)
