"""What a service stands on while it is loaded: a supervisor as systemd's."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Supervisor:
    """Starts the service again whenever it ends, as systemd does, and reads what it writes.

    ``lives``: of each process: when its memory was looked at (monotonic), and MiB of it.
    """

    command: list[str]
    folder: Path
    lives: list[list[tuple[float, float]]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Begin."""
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._supervise, self._weigh)]
        for thread in self._threads:
            thread.start()

    def kill(self) -> None:
        """Kill the process, as the kernel does where memory runs out."""
        assert self.process is not None
        self.kills.append(time.monotonic())
        self.process.kill()

    def stop(self) -> int:
        """End it orderly; return its exit code."""
        self.ended.set()
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(60)
        self.close()
        return code

    def close(self) -> None:
        """End whatever is left."""
        self.ended.set()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        for thread in self._threads:
            thread.join(20)

    def _supervise(self) -> None:
        while not self.ended.is_set():
            self.lives.append([])
            with subprocess.Popen(  # noqa: S603 - our own command
                self.command, cwd=self.folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
            ) as process:
                self.process = process
                assert process.stderr is not None
                for line in process.stderr:
                    if b'"level":"ERROR"' in line or b'"level": "ERROR"' in line or line.startswith(b"Traceback"):
                        self.errors.append(line.decode(errors="replace")[:2000])
            self.ended.wait(0.3)

    def _weigh(self) -> None:
        while not self.ended.wait(0.5):
            process = self.process
            if process is None or not self.lives:
                continue
            with contextlib.suppress(OSError, StopIteration, IndexError):
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                kib = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
                self.lives[-1].append((time.monotonic(), kib / 1024))
