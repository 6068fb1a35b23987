"""``POST /v1/telemetry``: samples and events for the online state, and questions about samples that are not kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from policy.risk_record import instant_words
from policy.tiers import UNKNOWN
from serving.http.fleet import frame, unit_answer
from serving.http.online import OnlineHolder
from serving.http.request import JSON, Answer, Request, unknown_name
from serving.http.routing import Route
from serving.http.settings import ServiceSettings
from serving.http.strict_json import read_json
from serving.http.work import Work
from telemetry.errors import InputError
from telemetry.receiving.problems import Refused

if TYPE_CHECKING:
    import pyarrow as pa

    from serving.online.state import OnlineState
    from serving.online.upkeep import OnlineUpkeep

ARROW: Final = "application/vnd.apache.arrow.stream"
KINDS: Final = ("samples", "events")
_ELSEWHERE: Final = ("inventory", "jobs")
_CONTAINERS: Final = 16
_OWN_COLUMNS: Final = 8  # keys and counts beside the channels; an event has fewer columns than these and the channels
_LEAST_COLUMNS: Final = 16


class TelemetryRoute:
    """Takes telemetry, and tells what became of every row.

    ``absorbing``: the thread that reads bodies and hands them to the state.
    """

    def __init__(
        self, online: OnlineHolder, settings: ServiceSettings, clock: Callable[[], datetime], absorbing: Work
    ) -> None:
        self._online, self._settings, self._clock, self._absorbing = online, settings, clock, absorbing

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [Route("POST", "/v1/telemetry", self._telemetry, "write")]

    def upkeep(self) -> OnlineUpkeep:
        """Return what looks after the online state, once it has begun.

        Raises ``Refused``: 409 if the service keeps none, 503 if it has not begun.
        """
        if not self._online.wanted:
            raise Refused(409, "telemetry is taken by a service that was started with --state", "state")
        upkeep = self._online.upkeep
        if upkeep is None or upkeep.state is None:
            raise Refused(503, str(self._online.trouble), "state", retry_after_s=self._settings.retry_after_s)
        return upkeep

    def sample_table(self, rows: Any) -> pa.Table:
        """Read samples from JSON, decoded already.

        Raises ``Refused``: 422, naming the row; 413 for too many; what :meth:`upkeep` raises.
        """
        return self._table("samples", rows, self.upkeep())

    def about(self, samples: pa.Table) -> dict[str, Any]:
        """Tell what samples say of their GPUs, without holding them.

        Raises ``Refused``: 503 before the first decision, 422 for samples that cannot be used.
        """
        upkeep = self.upkeep()
        decision, state = upkeep.served.decision, upkeep.state
        if decision is None or state is None or upkeep.served.fleet is None:
            detail = "the online state has not decided yet"
            raise Refused(503, detail, "state", retry_after_s=self._settings.retry_after_s)
        try:
            found = decision.with_samples(state, samples)
        except InputError as error:
            raise Refused(422, str(error), "invalid") from error
        now = self._clock()
        ends = [record.expires_at for record in found.records]
        issued = [record.issued_at for record in found.records]
        answers = [unit_answer(record, now) | {"scored": True} for record in found.records]
        why = "it is not in service at the decision time"
        answers += [_absent(unit, why) for unit in found.absent]
        return frame(upkeep.served.fleet, now) | {
            "issued_at": instant_words(max(issued, default=now)),
            "expires_at": instant_words(min(ends)) if ends else None,
            "expired": False,
            "samples": asdict(found.absorbed) | {"after_decision": found.later},
            "gpus": answers,
        }

    async def _telemetry(self, request: Request) -> Answer:
        kind = None
        for _, value in request.query(("kind",)):
            if value not in KINDS:
                raise Refused(422, _no_kind(value), "invalid")
            kind = value
        media = request.media()
        if media not in (JSON, ARROW):
            raise Refused(415, f"send {JSON} or {ARROW}", "media_type")
        upkeep = self.upkeep()
        body = await request.body()
        return await self._absorbing.run(lambda: self._take(request.plain(body), media, kind, upkeep))

    def _take(self, body: bytes, media: str, kind: str | None, upkeep: OnlineUpkeep) -> Answer:
        tables = self._arrow(body, kind, upkeep) if media == ARROW else self._json(body, kind, upkeep)
        events = tables.get("events")
        from serving.online.journal import NotKeptError  # noqa: PLC0415 - Arrow, with the state only

        try:
            absorbed, told = upkeep.push(tables.get("samples"), None if events is None else events.to_pandas())
        except NotKeptError as error:
            raise Refused(503, str(error), "disk", retry_after_s=self._settings.retry_after_s) from error
        except InputError as error:
            raise Refused(422, str(error), "invalid") from error
        return Answer.json({"samples": asdict(absorbed), "events": told})

    def _json(self, body: bytes, kind: str | None, upkeep: OnlineUpkeep) -> dict[str, pa.Table]:
        rows = self._settings.rows
        columns = max(len(_channels(upkeep)) + _OWN_COLUMNS, _LEAST_COLUMNS)
        content = read_json(body, containers=rows + _CONTAINERS, values=rows * columns, finite=False)
        if isinstance(content, list) and kind is not None:
            content = {kind: content}
        if not isinstance(content, dict):
            raise Refused(422, 'send an object such as {"samples": [...]}, or a list with ?kind=samples', "invalid")
        for name in content:
            if name not in KINDS:
                raise Refused(422, _no_kind(name), "invalid")
        if not any(content.values()):
            raise Refused(422, "the body holds neither samples nor events", "invalid")
        return {name: self._table(name, each, upkeep) for name, each in content.items() if each != []}

    def _table(self, kind: Any, rows: Any, upkeep: OnlineUpkeep) -> pa.Table:
        from telemetry.receiving.push import read_rows  # noqa: PLC0415 - Arrow, with the state only

        if not isinstance(rows, list) or not rows:
            raise Refused(422, f"{kind} is no list of rows", "invalid")
        if len(rows) > self._settings.rows:
            detail = f"{kind} holds {len(rows)} rows: send at most {self._settings.rows}"
            raise Refused(413, detail, "too_large")
        return read_rows(kind, rows, _channels(upkeep), now=self._clock())

    def _arrow(self, body: bytes, kind: str | None, upkeep: OnlineUpkeep) -> dict[str, pa.Table]:
        from telemetry.receiving.push import read_arrow  # noqa: PLC0415 - as above

        if kind is None:
            raise Refused(422, "name the kind of an Arrow body: ?kind=samples or ?kind=events", "invalid")
        from serving.http.long_samples import is_long, wide_samples  # noqa: PLC0415 - as above

        limits = self._settings
        if kind == "samples" and is_long(body):
            wide = wide_samples(body, _channels(upkeep), row_limit=limits.rows, byte_limit=limits.decoded_bytes)
            body = _stream_of(wide)  # so that all is checked that is checked of other bodies
        read = read_arrow(
            body,
            kind,
            _channels(upkeep),
            now=self._clock(),
            row_limit=limits.rows,
            byte_limit=limits.decoded_bytes,
        )
        return {str(name): table for name, table in read.items()}


def _channels(upkeep: OnlineUpkeep) -> Mapping[str, Any]:
    from telemetry.channels import CATALOGUE  # noqa: PLC0415 - as above

    state: OnlineState | None = upkeep.state
    assert state is not None
    return {**CATALOGUE, **state.config.channels}


def _stream_of(table: pa.Table) -> bytes:
    import pyarrow as pa  # noqa: PLC0415 - as above

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _no_kind(name: str) -> str:
    if name in _ELSEWHERE:
        return f"{name} is read from the dataset: push it to `predrain collect receive`"
    return unknown_name(name, KINDS, "kind")


def _absent(unit: str, why: str) -> dict[str, Any]:
    return {
        "unit": unit,
        "gpu": unit,
        "status": UNKNOWN,
        "why_unknown": why,
        "risk": None,
        "tier": UNKNOWN,
        "scored": False,
    }
