"""The registry's champion as a model: of the service, which has another process ask, and of batch scoring.

``python -m serving.champion.registry`` is that process: MLflow is imported there alone. It ends when its standard input
does, which is when the service that started it is gone, however it went.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from features.errors import InputError
from serving.champion.sources import ChampionCopy, FolderBundle, manifest_digest, temporary_folder
from serving.logs import log_to_stderr

if TYPE_CHECKING:
    from serving.scores.batch import ServedModel

_LOG = logging.getLogger("champion")
_REST_S: Final = 10.0  # before a process that died is started again
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
    version = version_at(registry, name, number)
    if copy.holds(number, version.digest) and not again:
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
        self._source = ChampionCopy(temporary_folder()) if model == CHAMPION else FolderBundle(Path(model))
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
            if isinstance(self._source, ChampionCopy):
                look(self._source, self._registry, self._name)
            named = self._source.named()
            if loaded is None or loaded.version != named.version or loaded.bundle.digest != manifest_digest(named.path):
                self._loaded = loaded = ServedModel(load_bundle(named.path), named.version)
        except InputError as error:
            if self._loaded is None:
                raise
            return replace(self._loaded, note=f"the model in use is kept: {error}")
        return loaded


class ChampionBundle(ChampionCopy):
    """The champion of a registered model, kept up to date by a process of its own.

    ``folder``: where its bundle is kept; one that is there already serves until the registry has been asked.
    ``registry``: ``sqlite:///PATH`` or a tracking server's address.
    """

    def __init__(self, folder: Path, registry: str, name: str, every_s: float = 30.0) -> None:
        super().__init__(folder)
        self._command = [sys.executable, "-m", "serving.champion.registry", registry, name, str(folder), str(every_s)]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="champion", daemon=True)

    def start(self) -> None:
        """Start the process that asks, and go on starting it whenever it has died."""
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def _supervise(self) -> None:
        while not self._stopped.is_set():
            try:
                self._run()
            except OSError as error:
                _LOG.error("the process that asks the registry cannot be started: %s", error)
            if not self._stopped.is_set():
                _LOG.warning("the process that asks the registry has ended; it is started again in %.0f s", _REST_S)
                self._stopped.wait(_REST_S)

    def _run(self) -> None:
        """Run the process until it ends by itself or is to end; it ends with its input."""
        with subprocess.Popen(  # noqa: S603 - our own module, and no shell
            self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        ) as process:
            while process.poll() is None and not self._stopped.wait(0.2):
                pass
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                process.kill()


def watch(copy: ChampionCopy, registry: str, name: str, every_s: float, stopped: threading.Event) -> None:
    """Look again and again until stopped; whatever goes wrong is noted next to the copy, and logged once."""
    reported: str | None = None
    taken_once = False
    while not stopped.is_set():
        error = None
        try:
            if look(copy, registry, name, again=not taken_once):
                _LOG.info("version %s is champion", copy.version())
            taken_once = True
        except Exception as fault:  # the next look may go well: a registry is restarted, a disk freed
            error = str(fault).partition("\n")[0] or type(fault).__name__
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
    registry, name, folder, every_s = sys.argv[1:]
    log_to_stderr()
    bound_registry_waits()
    stopped = threading.Event()
    threading.Thread(target=_until_end_of_input, args=(stopped,), daemon=True).start()
    watch(ChampionCopy(Path(folder)), registry, name, float(every_s), stopped)


def _until_end_of_input(stopped: threading.Event) -> None:
    while sys.stdin.buffer.read(1024):
        pass
    stopped.set()
    # A download under way may hang longer than a process without a parent should live.
    threading.Timer(5, os._exit, (0,)).start()


if __name__ == "__main__":
    main()
