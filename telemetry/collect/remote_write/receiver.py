"""Routes and metrics of the receiver."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Final, get_args

import pyarrow as pa
from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from foundation.errors import InputError
from foundation.running import stop_loop_on_signals
from foundation.server.connections import max_connections, serving
from foundation.server.problems import RequestRefused
from foundation.server.token_file import TokenFile, digest_of
from telemetry.accounting import Accounting, metrics
from telemetry.bounds import plausible_rows
from telemetry.collect.remote_write.arrow_body import read_stream
from telemetry.collect.remote_write.decoding import RemoteWriteDecoder, Samples, decompress
from telemetry.collect.remote_write.group_commit import GroupCommit, ReceiverSettings, SampleWriter
from telemetry.collect.series.identity import SeriesCatalogue
from telemetry.dataset.channels import CATALOGUE
from telemetry.staging.folder import Kind, StagingFolder, lay_out

_LOG = logging.getLogger(__name__)
_MIN_LENGTH = 16
disable_created_metrics()


def _plain_token(line: str, _number: int, location: str) -> tuple[bytes, bool]:
    if len(line) < _MIN_LENGTH:
        raise InputError(
            f"a token of {len(line)} characters is too short",
            location,
            f"Use {_MIN_LENGTH} characters or more, for example from `openssl rand -hex 32`.",
        )
    return digest_of(line), True


class Metrics:
    """Metrics of a receiver since its start, with the accounting of received rows."""

    def __init__(self, accounting: Accounting) -> None:
        self.registry = CollectorRegistry()
        self._accounting = accounting

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"predrain_receiver_{name}", text, labels, registry=self.registry)

        self.requests = counter("requests", "Requests answered.", "route", "status")
        self.samples = counter("samples", "Samples that were written.")
        self.buffered = Gauge("predrain_receiver_buffered_samples", "Samples in memory.", registry=self.registry)
        self.last_write = Gauge(
            "predrain_receiver_last_write_timestamp_seconds",
            "Time of the last write.",
            registry=self.registry,
        )
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the accounting."""
        yield from metrics(self._accounting)

    def write(self, samples: int, rows: int, problems: Mapping[str, int]) -> None:
        """Count a written group."""
        self.samples.inc(samples)
        self.last_write.set_to_current_time()
        self._accounting.take("sample values", samples, problems)
        self._accounting.take("samples", rows, {})


ARROW: Final = "application/vnd.apache.arrow.stream"
PROTOBUF: Final = "application/x-protobuf"
WRITE_1: Final = "prometheus.WriteRequest"

Handler = Callable[[Request], Awaitable[Response]]


class Receiver:
    """Receives telemetry over HTTP and stages it.

    ``catalogue``: identifies remote-write series, with the channels of ``staging``; default: the built-in channels.
    Raises ``InputError`` if the token file cannot be used.

    Delivery is at least once: a client retries without a response, and compaction removes duplicate rows.
    """

    def __init__(
        self,
        staging: StagingFolder,
        settings: ReceiverSettings | None = None,
        *,
        catalogue: SeriesCatalogue | None = None,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self.settings = ReceiverSettings() if settings is None else settings
        self.accounting = Accounting()
        self.metrics = Metrics(self.accounting)
        self._staging = staging
        self._catalogue = catalogue or SeriesCatalogue(CATALOGUE)
        tokens = self.settings.tokens
        self._tokens = None if tokens is None else TokenFile(tokens, _plain_token, "Give a file with one token a line.")
        clock = clock or (lambda: datetime.now(UTC))
        self._decoder = RemoteWriteDecoder(self._catalogue, clock=clock)
        self._writer = SampleWriter(staging, clock)
        self._commit = GroupCommit(self._writer.write, self.settings, self.metrics.write)
        self.metrics.buffered.set_function(lambda: self._commit.held_samples)
        self._active = 0
        self._held_bytes = 0

    def routes(self) -> list[Route]:
        """Return the routes, to mount in another application."""
        return [
            Route("/api/v1/write", self._guarded("write", self._write), methods=["POST"]),
            Route("/v1/telemetry", self._guarded("telemetry", self._telemetry), methods=["POST"]),
            Route("/healthz", lambda _: PlainTextResponse("ok\n"), methods=["GET"]),
            Route("/readyz", self._readyz, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]

    async def close(self) -> None:
        """Write pending samples and save the state."""
        await self._commit.close()
        await asyncio.to_thread(self._writer.close)

    def _guarded(self, route: str, handler: Handler) -> Handler:
        """Wrap a handler with the concurrency limit, authentication, problem responses and metrics."""

        async def guarded(request: Request) -> Response:
            if self._active >= self.settings.concurrency:
                return self._refuse(route, RequestRefused.busy("too many concurrent requests", "concurrency"))
            self._active += 1
            try:
                scheme, _, token = request.headers.get("authorization", "").partition(" ")
                if self._tokens is not None and not (scheme.lower() == "bearer" and self._tokens.grant(token)):
                    raise RequestRefused(
                        401, "send one of the receiver's tokens: `Authorization: Bearer TOKEN`", "token"
                    )
                response = await handler(request)
            except RequestRefused as refused:
                return self._refuse(route, refused)
            except ClientDisconnect:
                return self._refuse(route, RequestRefused(400, "the client disconnected", "disconnect"))
            finally:
                self._active -= 1
            self.metrics.requests.labels(route, response.status_code).inc()
            self.accounting.take("requests", 1, {})
            return response

        return guarded

    def _refuse(self, route: str, refused: RequestRefused) -> Response:
        self.metrics.requests.labels(route, refused.status).inc()
        self.accounting.take("requests", 1, {refused.reason: 1}, f"{refused.status} {refused.detail}")
        return Response(refused.body(), refused.status, headers=refused.headers())

    async def _write(self, request: Request) -> Response:
        media, parameters = _media_type(request.headers.get("content-type", PROTOBUF))
        if media != PROTOBUF or parameters.get("proto", WRITE_1) != WRITE_1:
            raise RequestRefused(415, f"send {PROTOBUF} with {WRITE_1} (remote write 1.0)", "media_type")
        if request.headers.get("content-encoding", "snappy").lower() != "snappy":
            raise RequestRefused(415, "send the body in snappy's block format", "encoding")
        self._commit.check_room()
        async with self._body(request) as body:
            samples = await asyncio.to_thread(self._decode, body)
        if len(samples):
            await self._commit.add(samples)
        # Counted only now: a request that was not written is retried.
        self.accounting.take("sample values", samples.dropped.total(), samples.dropped)
        return Response(status_code=204)

    def _decode(self, body: bytes) -> Samples:
        return self._decoder.decode(decompress(body, self.settings.decoded_bytes), limit=self.settings.request_rows)

    async def _telemetry(self, request: Request) -> Response:
        media, _ = _media_type(request.headers.get("content-type", ""))
        if media != ARROW:
            raise RequestRefused(415, f"send {ARROW}", "media_type")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise RequestRefused(415, "send the body without a content encoding", "encoding")
        kind, name = request.query_params.get("kind"), request.query_params.get("name")
        async with self._body(request) as body:
            left_out, example = await asyncio.to_thread(self._push, kind, name, body)
        if not left_out:
            return Response(status_code=204)
        return JSONResponse(
            {"left_out": [{"reason": reason, "count": n} for reason, n in left_out.items()], "example": example}
        )

    def _push(self, kind: str | None, name: str | None, body: bytes) -> tuple[dict[str, int], str | None]:
        """Stage a table pushed by another collector; return counts of rows left out, by reason, and an example.

        Only rows with implausible times, which would stop compaction, are left out; compaction validates the rest.
        """
        known: Kind | None = next((name for name in get_args(Kind) if name == kind), None)
        if known is None:
            raise RequestRefused(422, f"kind is {kind!r}: use one of {', '.join(get_args(Kind))}", "invalid")
        try:
            table = read_stream(body, row_limit=self.settings.request_rows, byte_limit=self.settings.decoded_bytes)
            for field in table.schema:  # the layout would take naive timestamps for UTC
                if pa.types.is_timestamp(field.type) and field.type.tz is None:
                    raise ValueError(f"{known}: {field.name} has no time zone")
            # Before the layout, which converts other time units to ms, and after it, which converts integers to times.
            table, left_out, example = plausible_rows(table)
            table, also_left_out, another = plausible_rows(lay_out(known, table, self._catalogue.channels))
            left_out, example = left_out | also_left_out, example or another
            if left_out and not table.num_rows:
                raise ValueError(f"no usable rows: {', '.join(left_out)}, such as {example}")
            staged = self._staging.stage(known, table, name=name)
        except (InputError, OSError) as error:
            _LOG.error("cannot stage a push: %s", error)
            raise RequestRefused.busy(f"the push cannot be stored now: {error}", "disk") from error
        except (ValueError, pa.ArrowException) as error:
            raise RequestRefused(422, str(error), "invalid") from error
        self.accounting.take(known, table.num_rows + sum(left_out.values()), left_out, example)
        if staged is not None:
            self.metrics.write(0, 0, {})
        return left_out, example

    @contextlib.asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """Read the body; its bytes count towards ``held_bytes`` until the block ends."""
        limit = self.settings.body_bytes
        too_large = RequestRefused.too_large(f"the body is larger than {limit} bytes: send smaller ones")
        length = request.headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length) > limit:
            raise too_large
        chunks: list[bytes] = []
        size = 0
        try:
            try:
                async with asyncio.timeout(self.settings.body_timeout_s):
                    async for chunk in request.stream():
                        size += len(chunk)
                        self._held_bytes += len(chunk)
                        chunks.append(chunk)
                        if size > limit:
                            raise too_large
                        if self._held_bytes > self.settings.held_bytes and self._held_bytes > size:
                            raise RequestRefused.busy("too many bodies are being read", "memory")
            except TimeoutError:
                detail = f"the body did not arrive within {self.settings.body_timeout_s:g} s"
                raise RequestRefused(408, detail, "slow") from None
            yield b"".join(chunks)
        finally:
            self._held_bytes -= size

    async def _readyz(self, _: Request) -> Response:
        if self._commit.failing:
            return PlainTextResponse("the last samples could not be stored\n", 503)
        if self._commit.held_samples >= self.settings.held_samples:
            return PlainTextResponse("too many samples wait to be written\n", 503)
        return PlainTextResponse("ready\n")

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _media_type(header: str) -> tuple[str, dict[str, str]]:
    media, *parameters = header.split(";")
    pairs = (part.partition("=") for part in parameters)
    return media.strip().lower(), {key.strip().lower(): value.strip().strip('"') for key, _, value in pairs}


def application(receiver: Receiver) -> Starlette:
    """Return the ASGI application; pending samples are written on shutdown."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await receiver.close()

    return Starlette(routes=receiver.routes(), lifespan=lifespan)


def serve(receiver: Receiver, host: str, port: int, *, started: Callable[[int], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then finish requests in flight; ``started`` is called with the port."""

    async def run() -> None:
        stop = stop_loop_on_signals()
        timeout_s = receiver.settings.head_timeout_s
        async with serving(application(receiver), host, port, head_timeout_s=timeout_s, lifespan="on") as server:
            _LOG.info("listening on %s:%d, up to %d connections", host, server.port, max_connections())
            if started is not None:
                started(server.port)
            await stop.wait()
            _LOG.info("shutting down after waiting rows are written")

    asyncio.run(run())
