"""The registry's champion as a model: of the service, which has another process ask, and of batch scoring.

``python -m serving.champion.registry`` is that process: MLflow is imported there alone. It ends when its standard input
does, which is when the service that started it is gone, however it went.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from features.errors import InputError
from serving.champion.sources import (
    CURRENT,
    ChampionCopy,
    FolderBundle,
    NamedBundle,
    manifest_digest,
    named_bundle,
    temporary_folder,
)
from serving.logs import log_to_stderr
from serving.scores.reading import stamp_of

if TYPE_CHECKING:
    from serving.scores.batch import ServedModel

_LOG = logging.getLogger("champion")
_LONGEST_REST_S: Final = 60.0
_SOUND_S: Final = 120.0  # a process that lived this long was no failed start
CHAMPION: Final = "champion"
"""What stands for the champion of the registry where a folder may be named."""


def look(copy: ChampionCopy, registry: str, name: str, *, again: bool = False) -> bool:
    """Copy the champion's bundle where it is another one than the copy's.

    ``registry``: ``sqlite:///PATH`` or a tracking server's address.
    ``again``: fetch it in any case: a restart makes good what a disk has done.
    Raises ``InputError`` if there is no champion, the registry cannot be asked, or its bundle is not the one that was
    registered.
    """
    from models.registry.champion import fetch_bundle, standing_of, version_at  # noqa: PLC0415 - MLflow, after the arguments

    number = standing_of(registry, name).champion
    if number is None:
        raise InputError(
            "there is no champion",
            f"model {name}, {registry}",
            "Make one with `predrain promote`, or give the folder of a bundle.",
        )
    current = copy.current()
    version = version_at(registry, name, number)
    same = current is not None and (current["version"], current["digest"]) == (number, version.digest)
    if same and not again:
        return False
    with tempfile.TemporaryDirectory(prefix="predrain-champion-") as folder:
        copy.take(fetch_bundle(registry, name, version, Path(folder)), number, version.digest)
    return True


def bound_registry_waits() -> None:
    """Keep MLflow from waiting for a registry that does not answer as long as it would by default: many minutes."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")


class ModelSource:
    """Loads the bundle for batch scoring; again when another one is named.

    ``model``: a bundle's folder, or :data:`CHAMPION` of the registered model ``name`` (a folder of that name:
    ``./champion``).
    """

    def __init__(self, model: str, *, registry: str, name: str) -> None:
        self._folder = None if model == CHAMPION else FolderBundle(Path(model))
        self._copy = ChampionCopy(temporary_folder()) if model == CHAMPION else None
        self._registry, self._name = registry, name
        self._loaded: ServedModel | None = None

    def current(self) -> ServedModel:
        """Give the present model; the one that was given before where the present one cannot be had.

        Raises ``InputError`` if there is none, and none was given before.
        """
        from models.bundle.store import load_bundle  # noqa: PLC0415 - heavy, and not for the service
        from serving.scores.batch import ServedModel  # noqa: PLC0415 - as above

        loaded = self._loaded
        try:
            named = self._named()
            if loaded is None or loaded.version != named.version or loaded.bundle.digest != manifest_digest(named.path):
                self._loaded = loaded = ServedModel(load_bundle(named.path), named.version)
        except InputError as error:
            if self._loaded is None:
                raise
            return replace(self._loaded, note=f"the model in use is kept: {error}")
        return loaded

    def _named(self) -> NamedBundle:
        if self._copy is None:
            assert self._folder is not None
            return self._folder.named()
        look(self._copy, self._registry, self._name)
        return named_bundle(self._copy)


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
            "serving.champion.registry",
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


def watch(copy: ChampionCopy, registry: str, name: str, every_s: float, stopped: threading.Event) -> None:
    """Look again and again until told to stop; whatever goes wrong is noted beside the copy."""
    reported: str | None = None
    first = True
    while not stopped.is_set():
        error = None
        try:
            taken = look(copy, registry, name, again=first)
            first = False
            if taken:
                _LOG.info("version %s is champion", (copy.current() or {}).get("version"))
        except Exception as fault:  # the next look may go well: a registry is restarted, a disk freed
            error = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
            if error != reported:
                _LOG.warning("the champion cannot be taken: %s", error)
        reported = error
        try:
            copy.note(error)
        except InputError as full:
            _LOG.warning("%s", full)
        stopped.wait(every_s)


def main() -> None:
    """Read the arguments, and watch until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--registry", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=float, default=30.0)
    given = parser.parse_args()
    log_to_stderr()
    bound_registry_waits()
    stopped = threading.Event()
    threading.Thread(target=_until_end_of_input, args=(stopped,), daemon=True).start()
    watch(ChampionCopy(given.out), given.registry, given.name, given.every, stopped)


def _until_end_of_input(stopped: threading.Event) -> None:
    while sys.stdin.buffer.read(1024):
        pass
    stopped.set()
    # A download under way may hang for longer than anybody wants to wait for a process without a parent.
    threading.Timer(5, os._exit, (0,)).start()


if __name__ == "__main__":
    main()
