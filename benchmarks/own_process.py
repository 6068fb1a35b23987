"""A part of a benchmark in a process of its own, so that what it takes of memory and loads is its own."""

from __future__ import annotations

import json
import os
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
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)  # noqa: S603 - ourselves
    if done.returncode:
        sys.exit(f"{' '.join(command[1:])} ended with {done.returncode}\n{done.stderr}")
    told: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return told
