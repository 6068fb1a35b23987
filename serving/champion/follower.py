"""The registry's champion as a service's model: another process asks the registry, this one reads a folder."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

from serving.champion.local_copy import CURRENT, ChampionCopy, named_bundle
from serving.champion.sources import NamedBundle, stamp_of

_LOG = logging.getLogger(__name__)
_LONGEST_REST_S: Final = 60.0
_SOUND_S: Final = 120.0  # a process that lived this long was no failed start


class ChampionBundle:
    """The champion of a registered model.

    ``registry``: ``sqlite:///PATH`` or a tracking server's address.
    ``folder``: where its bundle is kept; one that is there already serves until the registry has been asked.
    """

    def __init__(self, registry: str, name: str, folder: Path, every_s: float = 30.0) -> None:
        self._copy = ChampionCopy(folder)
        self._command = [
            sys.executable,
            "-m",
            "serving.champion.watcher",
            *("--registry", registry, "--name", name, "--out", str(folder), "--every", str(every_s)),
        ]
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._supervise, name="champion", daemon=True)

    def start(self) -> None:
        """Start the process that asks, and go on starting it whenever it has died."""
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def stamp(self) -> object:
        """Give what changes when another version is champion, or the registry can no longer be asked."""
        return (*(stamp_of(self._copy.path / CURRENT)), self._copy.error())

    def named(self) -> NamedBundle:
        """Name the champion's bundle, see :class:`serving.champion.sources.BundleSource`."""
        return named_bundle(self._copy)

    def _supervise(self) -> None:
        rest = 1.0
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                self._process = subprocess.Popen(  # noqa: S603 - our own module, and no shell
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
                )
            except OSError as error:
                _LOG.error("the process that asks the registry cannot be started: %s", error)
            else:
                self._wait(self._process)
            if self._stopped.is_set():
                return
            rest = 1.0 if time.monotonic() - began > _SOUND_S else min(2 * rest, _LONGEST_REST_S)
            _LOG.warning("the process that asks the registry has ended; it is started again in %.0f s", rest)
            self._stopped.wait(rest)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None and not self._stopped.wait(0.2):
            pass
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()  # it ends with its input
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)
