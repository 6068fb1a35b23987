#!/usr/bin/env python3
"""Node health check for NVIDIA's resiliency extension: excludes a node of tier ``high`` from a rendezvous.

``ft_launcher --ft-node-health-check-endpoint SOCKET`` calls it over a Unix socket. A node that fails the check is
replaced by a hot spare. It fails only with a valid score of tier ``high``. If the service does not respond, the last
response is used until it expires; without one, the node passes. Requires grpcio.

    nvrx_node_health.py SOCKET

Environment: PREDRAIN_URL (default http://127.0.0.1:8080), PREDRAIN_TOKEN_FILE (a file with a `read` token), and NODE
(name of this node in the service; default: its host name).
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc

TIMEOUT_S = 5
"""The extension gives up after 60."""

CHECK = "predrain_failure_risk"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The token goes to the configured address only."""

    def redirect_request(self, *_: Any) -> None:
        return None


class NodeRisk:
    """What predrain says of this node; the last answer is kept until it expires."""

    def __init__(self, url: str, node: str, token_file: str) -> None:
        self._url = f"{url.rstrip('/')}/v1/nodes/{urllib.parse.quote(node, safe='')}"
        self._token_file = token_file
        self._open = urllib.request.build_opener(_NoRedirect).open
        self._last: dict[str, Any] = {}

    def now(self) -> dict[str, Any]:
        """Give the newest answer, and with ``problem`` why it is not new."""
        try:
            token = Path(self._token_file).read_text(encoding="utf-8").strip() if self._token_file else ""
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            request = urllib.request.Request(self._url, headers=headers)  # noqa: S310 - the operator's own address
            with self._open(request, timeout=TIMEOUT_S) as answer:
                self._last = dict(json.load(answer))
        except (OSError, ValueError) as error:
            return {**self._last, "problem": f"no response from {self._url}: {error}"}
        return self._last


def health(risk: dict[str, Any], now: datetime) -> tuple[bool, dict[str, Any]]:
    """Evaluate a node, with a reason for the extension: 0.6 counts ``fail_count``, later ones ``failed_checks``."""
    try:
        holds = not risk.get("expired") and now < datetime.fromisoformat(risk["expires_at"])
    except (KeyError, TypeError, ValueError):
        holds = False
    failed = [CHECK] if holds and risk.get("tier") == "high" else []
    shown = {name: risk[name] for name in ("node", "tier", "risk", "expires_at", "problem") if name in risk}
    return not failed, {"fail_count": len(failed), "failed_checks": failed, **shown}


def response(passed: bool, output: dict[str, Any]) -> bytes:
    """Write nvhcd.HealthCheckResponse: success = 1, exit_code = 2, output = 3 (protocol buffers)."""
    text = json.dumps(output).encode()
    size, length = len(text), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return (b"\x08\x01" if passed else b"\x10\x01") + b"\x1a" + bytes(length) + text


def main() -> None:
    """Answer until SIGTERM, and take the socket away: one without a daemon keeps each rendezvous waiting."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    path = Path(sys.argv[1]).absolute()
    node = os.environ.get("NODE") or socket.gethostname()
    url = os.environ.get("PREDRAIN_URL") or "http://127.0.0.1:8080"
    risk = NodeRisk(url, node, os.environ.get("PREDRAIN_TOKEN_FILE", ""))

    def check(_: bytes, __: grpc.ServicerContext) -> bytes:
        passed, output = health(risk.now(), datetime.now(UTC))
        print(json.dumps(output), file=sys.stderr, flush=True)
        return response(passed, output)

    method = {"RunHealthCheck": grpc.unary_unary_rpc_method_handler(check)}
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("nvhcd.HealthCheckService", method),))
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # of a daemon that was killed
    server.add_insecure_port(f"unix:{path}")
    server.start()
    path.chmod(0o666)  # jobs are of other users; all they can do is ask
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    print(f"node {node}: listening on {path}, using {url}", file=sys.stderr, flush=True)
    stop.wait()
    server.stop(grace=TIMEOUT_S).wait()
    path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
