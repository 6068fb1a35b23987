"""The service as a process: two listeners on one event loop, TLS, graceful shutdown."""

import asyncio
import contextlib
import gc
import logging
import signal
import ssl
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from foundation.errors import InputError
from foundation.files import stamp_of
from foundation.server.connections import serving
from serving.service import Service

_LOG = logging.getLogger(__name__)
_HANDSHAKE_S: Final = 10.0
_POLL_S: Final = 5.0
SWITCH_INTERVAL_S: Final = 0.0005
"""Time that a computing thread may hold the GIL while the event loop waits; a lookup waits several times, and Python's
default is 5 ms."""

GC_THRESHOLDS: Final = (50_000, 20, 100)
"""Thresholds of the cyclic garbage collector. A decision has hundreds of thousands of objects and no reference cycles;
with Python's defaults each full collection paused all responses for up to 200 ms."""

EXTENDER_HOST: Final = "127.0.0.1"
"""The extender has no authentication, so by default only its own machine can reach it."""


class _Loop(asyncio.SelectorEventLoop):
    """An event loop with a timeout for TLS handshakes; connections are counted only after theirs."""

    async def create_server(self, *args: Any, **options: Any) -> asyncio.Server:
        """Listen, with the handshake timeout for TLS."""
        if options.get("ssl") is not None:
            options.setdefault("ssl_handshake_timeout", _HANDSHAKE_S)
        return await super().create_server(*args, **options)


def serve(
    service: Service,
    host: str = "127.0.0.1",
    port: int = 8080,
    *,
    extender_port: int | None = 8081,
    extender_host: str = EXTENDER_HOST,
    tls: "Tls | None" = None,
    started: Callable[[int, int | None], None] | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Run until SIGTERM or SIGINT, then finish in-flight requests and accept no new ones.

    ``host``, ``port``: listen address; port 0: a free port.
    ``extender_port``, ``extender_host``: listen address of the scheduler extender; port None: no extender.
    ``started``: called with both ports once the service listens.
    ``stop``: replaces the signals if the service runs in a thread.
    Raises ``InputError`` if it cannot listen on a port.
    """
    settings = service.settings
    servers = 1 if extender_port is None else 2
    listening = partial(serving, head_timeout_s=settings.head_timeout_s, servers=servers, grace_s=settings.grace_s)

    async def run() -> None:
        loop, leaving = asyncio.get_running_loop(), asyncio.Event()

        def leave(number: signal.Signals) -> None:
            _LOG.info("%s: shutting down after in-flight requests finish", number.name)
            leaving.set()

        if stop is None:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, leave, number)
        async with contextlib.AsyncExitStack() as stack:
            context = None if tls is None else tls.context
            running = [await stack.enter_async_context(listening(service.api, host, port, tls=context))]
            if extender_port is not None:  # by default only reachable from this machine, so no TLS
                extender = listening(service.extender, extender_host, extender_port, option="--extender-listen")
                running.append(await stack.enter_async_context(extender))
            ports = [server.port for server in running]
            _LOG.info("serving on %s:%d%s", host, ports[0], f", extender on {ports[1]}" if len(ports) > 1 else "")
            if started is not None:
                started(ports[0], ports[1] if len(ports) > 1 else None)
            service.start()
            renewal = None if tls is None else loop.create_task(tls.follow())
            await (leaving.wait() if stop is None else asyncio.to_thread(stop.wait))
            for server in running:  # both stop accepting now, and exit together
                server.should_exit = True
            if renewal is not None:
                renewal.cancel()

    try:
        with asyncio.Runner(loop_factory=_Loop) as runner:
            runner.run(run())
    finally:
        service.close()


def be_responsive() -> None:
    """Set the switch interval and the garbage collector's thresholds of the process."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)


class Tls:
    """A server's certificate, reloaded within seconds when its files change.

    ``certificate``, ``key``: PEM files with the certificate chain and its unencrypted private key.
    ``context``: TLS 1.2 or later, with Python's default ciphers.
    Raises ``InputError`` if the files are unreadable or do not match.
    """

    def __init__(self, certificate: Path, key: Path, poll_s: float = _POLL_S) -> None:
        self._certificate, self._key = certificate, key
        self._poll_s = poll_s
        self._last_stamps = self._stamps()
        self.context = _context(certificate, key)

    def refresh(self) -> bool:
        """Reload the certificate if it has changed; an invalid one is logged, and the previous one stays in use.

        Returns: whether new connections use another certificate. Open ones keep theirs.
        """
        stamps = self._stamps()
        if stamps == self._last_stamps:
            return False
        try:
            _context(self._certificate, self._key)  # a mismatched pair must not reach the context in use
            self.context.load_cert_chain(self._certificate, self._key, _no_password)
        except (InputError, OSError) as error:
            # Certificate and key are often replaced one after the other: the next change triggers another attempt.
            _LOG.warning("the new certificate is invalid, and the previous one stays in use: %s", error)
            return False
        finally:
            self._last_stamps = stamps
        _LOG.info("the certificate was reloaded")
        return True

    def _stamps(self) -> tuple[object, ...]:
        return tuple(stamp_of(path) for path in (self._certificate, self._key))

    async def follow(self) -> None:
        """Reload the certificate when it changes, until cancelled."""
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                self.refresh()
            except Exception:  # must continue, or the certificate would expire
                _LOG.exception("the certificate cannot be checked")


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise InputError(
            f"the certificate and the key cannot be used: {reason}",
            f"--tls-cert {certificate}, --tls-key {key}",
            "Give matching PEM files that this user can read, and a key without a password.",
        ) from None
    return context


def _no_password() -> NoReturn:
    raise ValueError("the key has a password")
