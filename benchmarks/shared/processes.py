"""Run a part of a benchmark in a separate process, to measure its memory; free ports."""

import http.client
import json
import os
import socket
import subprocess
import sys
from pathlib import Path


def peak_mb() -> float:
    """Return the peak memory of this process in MiB; the parent process does not count."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def run_json(script: str, *arguments: object, compiled: Path | None = None) -> dict[str, float]:
    """Run a benchmark file with other arguments; return the JSON object on its last line.

    ``compiled``: folder for compiled kernels; default: the one of this process.

    Raises ``SystemExit`` with the standard error if the process fails.
    """
    command = [sys.executable, script, *map(str, arguments)]
    env = {**os.environ, "NUMBA_CACHE_DIR": str(compiled)} if compiled else None
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        sys.exit(f"{' '.join(command[1:])} ended with {done.returncode}\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get_once(port: int, path: str) -> tuple[int, bytes]:
    """Send one GET request; return status and body, or status 0 without an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()
