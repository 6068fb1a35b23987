"""Spans of requests: named by route, children of the caller's, holding nothing of query or body; and off by default."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from serving.http.access_log import AccessLog, Tracing
from tests.serving.http.world import running, small_fleet, wait, write_scores

trace = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
export = pytest.importorskip("opentelemetry.sdk.trace.export")

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Kept(export.SpanExporter):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        self.spans: list[trace.ReadableSpan] = []  # type: ignore[name-defined]

    def export(self, spans: Sequence[object]) -> object:
        self.spans += spans
        return export.SpanExportResult.SUCCESS


def test_each_request_is_a_span_of_its_route(tmp_path: Path) -> None:
    write_scores(tmp_path, small_fleet())
    kept = Kept()
    provider = trace.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(kept))
    log = io.StringIO()
    with running(tmp_path, tracing=Tracing(provider.get_tracer("test")), log=AccessLog(log)) as service:
        client = service.client()
        client.send("GET", "/v1/nodes/n1", traceparent=f"00-{TRACE}-00f067aa0ba902b7-01")
        client.send("GET", "/v1/nodes?decision=secret")
        client.send("GET", "/nowhere/secret")
        client.send("DELETE", "/v1/nodes", traceparent="garbage")
        wait(lambda: len(kept.spans) == 4)
        wait(lambda: log.getvalue().count("\n") >= 4)
    assert [(each.name, each.attributes["http.response.status_code"]) for each in kept.spans] == [
        ("GET /v1/nodes/{node}", 200),
        ("GET /v1/nodes", 409),
        ("GET unmatched", 404),
        ("_OTHER unmatched", 405),
    ]
    first = kept.spans[0]
    assert (f"{first.context.trace_id:032x}", f"{first.parent.span_id:016x}") == (TRACE, "00f067aa0ba902b7")
    assert "secret" not in "".join(each.to_json() for each in kept.spans)
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [line.get("trace") for line in lines if "route" in line] == [TRACE, None, None, None]
