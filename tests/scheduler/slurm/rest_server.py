"""A small real HTTP server that answers as slurmrestd does, over TCP or a unix socket."""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from tests.scheduler.slurm.fake_slurm import job_row, node_row, number_of


class Rest:
    """What it tells, and what it was asked."""

    def __init__(self, version: int = 42) -> None:
        self.versions = {version}
        self.token = "secret"
        self.fault: str | None = None
        self.asked: list[tuple[str, str, Any]] = []
        self.nodes = {f"n{i}": node_row(i, number_of(0), number_of(1770000000)) for i in range(2)}
        self.jobs = [job_row(5, "n0", comment="predrain.checkpoint=B:USR1")]

    def answer(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:  # noqa: PLR0911 - a route each
        parts = urlsplit(path)
        version, _, rest = parts.path.removeprefix("/slurm/v0.0.").partition("/")
        if not version.isdecimal() or int(version) not in self.versions:
            return 404, {"errors": [{"error": "Unable to find requested URL"}]}
        kind, _, name = rest.partition("/")
        if method == "GET" and kind in ("nodes", "node"):
            if name and name not in self.nodes:
                return 500, {"nodes": [], "errors": [{"error": "Invalid node name specified", "error_number": 2007}]}
            return 200, self._report("nodes", [self.nodes[name]] if name else list(self.nodes.values()))
        if method == "GET" and kind == "jobs":
            return 200, self._report("jobs", self.jobs)
        if method == "POST" and kind == "node" and int(version) >= 39:
            if name not in self.nodes:
                return 500, {"errors": [{"error": "Invalid node name specified"}]}
            return self._update(self.nodes[name], body)
        if method == "DELETE" and kind == "job":
            known = any(str(job["job_id"]) == name for job in self.jobs)
            return (200, {"errors": []}) if known else (500, {"errors": [{"error": "Invalid job id specified"}]})
        return 405, {"errors": [{"error": f"{method} is not offered {parse_qs(parts.query)}"}]}

    def _update(self, node: dict[str, Any], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body.get("state") in (["DRAIN"], ["FAIL"]):
            if not body.get("reason"):
                return 500, {"errors": [{"error": "a reason is needed"}]}
            node["state"] = ["IDLE", body["state"][0]]
        if body.get("state") == ["UNDRAIN"]:
            node.update(state=["IDLE"], reason="", reason_changed_at=number_of(0))
        if "reason" in body:
            node.update(reason=body["reason"], reason_changed_at=number_of(1771000000), reason_set_by_user="slurm")
        if "extra" in body:
            node["extra"] = body["extra"]
        if "weight" in body:
            node["weight"] = body["weight"]["number"] if isinstance(body["weight"], dict) else body["weight"]
        return 200, {"errors": [], "warnings": []}

    def _report(self, key: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
        version = max(self.versions)
        return {
            key: rows, "meta": {"plugin": {"data_parser": f"data_parser/v0.0.{version}"}}, "errors": [], "warnings": []
        }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    rest: ClassVar[Rest]

    def _any(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        self.rest.asked.append((self.command, self.path, body))
        fault = self.rest.fault
        if fault == "slow":
            time.sleep(1)
        if fault == "cut":
            self.connection.close()
            return
        status, content = self.rest.answer(self.command, self.path, body)
        if self.headers.get("X-SLURM-USER-TOKEN") != self.rest.token:
            status, content = 401, {"errors": [{"error": "Authentication failure"}]}
        made = json.dumps(content).encode()
        if fault == "redirect":
            status = 302
        if fault == "garbage":
            made = b"<html>"
        with contextlib.suppress(OSError):
            self.send_response(status)
            if fault == "redirect":
                self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.send_header("Content-Length", str(len(made)))
            self.end_headers()
            self.wfile.write(made[: len(made) // 2] if fault == "truncated" else made)

    do_GET = do_POST = do_DELETE = _any

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def address_string(self) -> str:
        return "somebody"


@contextlib.contextmanager
def serving(rest: Rest, socket: Path | None = None) -> Iterator[str]:
    """Serve, and give the address as the settings take it."""
    handler = type("Handler", (_Handler,), {"rest": rest})
    server: socketserver.BaseServer
    if socket is None:
        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler)
        where = f"http://127.0.0.1:{server.server_address[1]}"
    else:
        server = socketserver.ThreadingUnixStreamServer(str(socket), handler)
        where = f"unix:{socket}"
    server.daemon_threads = True  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield where
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
