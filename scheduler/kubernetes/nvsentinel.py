"""What we publish once more as a health event, given to NVSentinel's platform connector: kept, and acted on by none."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from policy.fleet import Level, Published
from policy.plan import Action
from scheduler.ports.readings import Write
from telemetry.errors import InputError

METHOD: Final = "/datamodels.PlatformConnector/HealthEventOccurredV1"
CHECK: Final = "PredrainGPUFailurePredicted"
ERROR_CODE: Final = "PREDRAIN_GPU_FAILURE_PREDICTED"
ENTITY: Final = "GPU_UUID"

_VERSION: Final = 1
_RUN_DCGMEUD: Final = 26
_STORE_ONLY: Final = 2
_MAX_MESSAGE: Final = 1000
_MAX_ENTITIES: Final = 16
_WITHIN_S: Final = 2.0
_QUIET_S: Final = 60.0


class HealthEvents:
    """Reports to NVSentinel when a node's tier becomes ``high``, and when it no longer is.

    ``elapsed``: seconds of a clock that never goes back.
    Raises ``InputError`` if grpcio, the extra ``nvsentinel``, is not installed.

    The messages are those of NVSentinel's published ``health_event.proto`` (package ``datamodels``). Each is marked
    ``STORE_ONLY``: it is kept and exported, and no module of NVSentinel acts on it. Like an event of the API server it
    is told once, with the mark that it tells of; nothing rests on it, and one that is lost is not told again.
    """

    def __init__(
        self, path: Path, elapsed: Callable[[], float] = time.monotonic, *, within_s: float = _WITHIN_S
    ) -> None:
        if importlib.util.find_spec("grpc") is None:
            raise InputError(
                "NVSentinel is told by gRPC, and grpcio is not installed",
                "parameter kubernetes.nvsentinel_socket",
                "Run: pip install 'predrain[nvsentinel]'.",
            )
        self._path = path
        self._within_s = within_s
        self._elapsed = elapsed
        self._quiet_until = elapsed()

    def preview(self, action: Action, before: Published | None) -> Write | None:
        """Return what would be reported of an action on a node with ``before`` published; None: nothing."""
        healthy = _healthy(action, before)
        if healthy is None:
            return None
        words = "healthy" if healthy else f"unhealthy ({', '.join(action.units) or 'no GPU named'}): {_message(action)}"
        return Write(f"node {action.node}", f"NVSentinel health event {CHECK}", None, words)

    def tell(self, action: Action, before: Published | None, now: datetime) -> str | None:
        """Report an action that was carried out; return what failed."""
        healthy = _healthy(action, before)
        if healthy is None:
            return None
        if self._elapsed() < self._quiet_until:  # a connector that hangs must not hold up the round node by node
            return "NVSentinel was not told: it did not answer a moment ago"
        failed = self._call(health_events(action, now, healthy=healthy))
        if failed is not None:
            self._quiet_until = self._elapsed() + _QUIET_S
            return f"NVSentinel was not told: {failed}"
        return None

    def _call(self, request: bytes) -> str | None:
        import grpc  # noqa: PLC0415  an extra

        # a channel of its own for each of these few calls: none is left to be forked or to reconnect by itself
        with grpc.insecure_channel(f"unix:{self._path}", options=(("grpc.enable_retries", 0),)) as channel:
            try:
                channel.unary_unary(METHOD)(request, timeout=self._within_s)
            except grpc.RpcError as error:
                return f"{error.code().name} ({error.details()})"
        return None


def health_events(action: Action, now: datetime, *, healthy: bool) -> bytes:
    """Write the request (``HealthEvents`` with one ``HealthEvent``) of an action.

    ``healthy``: whether it takes back what was told before; then no GPU is named, and it is about all.
    """
    metadata: dict[str, str] = {"tier": action.tier}
    if action.risk is not None:
        metadata["risk"] = f"{action.risk:.6g}"
    if action.expires_at is not None:
        metadata["expires_at"] = action.expires_at.astimezone(UTC).isoformat()
    entities = () if healthy else action.units[:_MAX_ENTITIES]
    stamp = now.astimezone(UTC)
    event = b"".join(
        (
            _number(1, _VERSION),
            _text(2, "predrain"),
            _text(3, "GPU"),
            _text(4, CHECK),
            _number(5, 0),  # not fatal: it is a prediction
            _number(6, int(healthy)),
            _text(7, _message(action)),
            _number(8, 0 if healthy else _RUN_DCGMEUD),
            b"" if healthy else _text(9, ERROR_CODE),
            *(_bytes(10, _text(1, ENTITY) + _text(2, each)) for each in entities),
            *_entries(11, metadata),
            _bytes(12, _number(1, int(stamp.timestamp())) + _number(2, stamp.microsecond * 1000)),
            _text(13, action.node),
            _number(16, _STORE_ONLY),
        )
    )
    return _number(1, _VERSION) + _bytes(2, event)


def _healthy(action: Action, before: Published | None) -> bool | None:
    was = before is not None and before.tier == "high"
    if action.verb == "publish" and (action.tier == "high") != was:
        return was
    return True if action.verb == "release" and action.to < Level.PUBLISHED and was else None


def _message(action: Action) -> str:
    return "; ".join(action.reasons[:3])[:_MAX_MESSAGE] or f"tier {action.tier}"


def _entries(field: int, entries: Mapping[str, str]) -> tuple[bytes, ...]:
    return tuple(_bytes(field, _text(1, name) + _text(2, value)) for name, value in sorted(entries.items()))


def _number(field: int, value: int) -> bytes:
    # what has its default is not written
    return _varint(field << 3) + _varint(value) if value else b""


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode("utf-8", "replace"))


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
