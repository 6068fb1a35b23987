"""A part of a benchmark in a process of its own, so that its memory and loads are its own; and free ports."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from pathlib import Path


def peak_mb() -> float:
    """Return the most memory that this program has held, in MB of 2**20 bytes; not what the one that began it held."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def told_by(script: str, *arguments: object, compiled: Path | None = None) -> dict[str, float]:
    """Run a benchmark's file anew with other arguments, and give the JSON object that it prints last.

    Compiled code is kept in the folder ``compiled``; default: where this process keeps it.

    Raises ``SystemExit`` if it fails, with what it wrote on stderr.
    """
    command = [sys.executable, script, *map(str, arguments)]
    env = {**os.environ, "NUMBA_CACHE_DIR": str(compiled)} if compiled else None
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        sys.exit(f"{' '.join(command[1:])} ended with {done.returncode}\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def free_port() -> int:
    """Give a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def asked_once(port: int, path: str) -> tuple[int, bytes]:
    """Give the status and the body of one request; status 0 where nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()
