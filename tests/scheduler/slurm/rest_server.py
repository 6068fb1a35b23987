"""A small real HTTP server that answers as slurmrestd does, over TCP or a unix socket."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests import http_server
from tests.http_server import Handler
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

    def answer(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        parts = urlsplit(path)
        version, _, rest = parts.path.removeprefix("/slurm/v0.0.").partition("/")
        if not version.isdecimal() or int(version) not in self.versions:
            return 404, {"errors": [{"error": "Unable to find requested URL"}]}
        kind, _, name = rest.partition("/")
        if method == "GET" and kind in ("nodes", "node"):
            if name and name not in self.nodes and int(version) >= 42:
                error = {"description": f"Failure to query node {name}", "error_number": 0, "error": "No error"}
                return 200, {"nodes": [], "errors": [error]}
            if name and name not in self.nodes:
                return 500, {"nodes": [], "errors": [{"error": "Invalid node name specified", "error_number": 2007}]}
            return 200, self._report("nodes", [self.nodes[name]] if name else list(self.nodes.values()))
        if method == "GET" and kind == "diag":
            return 200, {"statistics": {"req_time": 1796047292 if int(version) < 40 else number_of(1796047292)}}
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
            node["state"] = ["IDLE"]
            if max(self.versions) < 42:  # 24.11 keeps the reason
                node.update(reason="", reason_changed_at=number_of(0))
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


@contextlib.contextmanager
def serving(rest: Rest, socket: Path | None = None) -> Iterator[str]:
    """Serve, and give the address as the settings take it."""

    class Answering(Handler):
        def handle_request(self) -> None:
            content = self.body()
            rest.asked.append((self.command, self.path, json.loads(content) if content else None))
            fault = rest.fault
            if fault == "slow":
                time.sleep(1)
            if fault == "cut":
                self.close_connection = True
                return
            status, report = rest.answer(*rest.asked[-1])
            if self.headers.get("X-SLURM-USER-TOKEN") != rest.token:
                status, report = 401, {"errors": [{"error": "Authentication failure"}]}
            if fault == "errors":  # as slurmrestd does where slurmctld does not answer it
                error = {"error": "Unable to contact slurm controller", "error_number": 1800}
                report = {**report, "errors": [{**error, "description": "Failure to query node n0"}]}
            made = b"<html>" if fault == "garbage" else json.dumps(report).encode()
            headers = {"Content-Length": str(len(made))}
            if fault == "redirect":
                status, headers["Location"] = 302, "http://127.0.0.1:9/elsewhere"
            self.close_connection = fault == "truncated"
            self.reply(status, made[: len(made) // 2] if fault == "truncated" else made, headers)

        do_GET = do_POST = do_DELETE = handle_request

    with http_server.serving(Answering, socket=socket) as address:
        yield address
