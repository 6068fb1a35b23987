"""The process that asks the registry who is champion, and copies its bundle for the service: MLflow lives here alone.

Run as ``python -m serving.champion.watcher``; it ends when its standard input does, which is when the service
that started it is gone, however it went.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import threading
from pathlib import Path

from features.errors import InputError
from serving.champion.local_copy import ChampionCopy

_LOG = logging.getLogger("champion")


def look(copy: ChampionCopy, registry: str, name: str, *, verify: bool = False) -> bool:
    """Copy the champion's bundle where it is another one than the copy's.

    ``registry``: ``sqlite:///PATH`` or a tracking server's address.
    ``verify``: whether a copy that is there already is read, and fetched again where the disk has damaged it.
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
    if current is not None and (current["version"], current["digest"]) == (number, version.digest):
        if not verify or copy.is_whole(current):
            return False
        _LOG.warning("the copy of version %s is damaged on the disk; it is fetched again", number)
    with tempfile.TemporaryDirectory(prefix="predrain-champion-") as folder:
        copy.take(fetch_bundle(registry, name, version, Path(folder)), number, version.digest)
    return True


def watch(copy: ChampionCopy, registry: str, name: str, every_s: float, stopped: threading.Event) -> None:
    """Look again and again until told to stop; whatever goes wrong is noted beside the copy."""
    reported: str | None = None
    verified = False
    while not stopped.is_set():
        error = None
        try:
            taken = look(copy, registry, name, verify=not verified)  # once: a restart makes good what a disk has done
            verified = True
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
    from serving.json_log import JsonLines  # noqa: PLC0415 - after the arguments

    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # A registry that does not answer must not be waited for as long as MLflow would by default: many minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
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
