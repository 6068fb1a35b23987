"""What the pages show of a dataset, read by processes of their own: the service itself never loads pandas.

One process answers questions about channels, one line of JSON each way; another runs whenever the scores or the dataset
have changed, and tells where units stand and what came of earlier alerts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final

from features.errors import InputError
from serving.pages.locations import Place, places_of

_LOG = logging.getLogger(__name__)
_LONGEST_ANSWER: Final = 64 * 2**20
_ANSWER_WITHIN_S: Final = 20.0
_FACTS_WITHIN_S: Final = 900.0
_LOOK_EVERY_S: Final = 30.0
_AGAIN_AFTER_S: Final = 300.0
_IDLE_S: Final = 600.0
_REST: Final = 10.0


@dataclass(frozen=True, slots=True)
class ChannelSeries:
    """A channel's last days, in equal intervals.

    ``kind``: ``counter``: what is shown is its rise an interval.
    ``min``, ``mean``, ``max``: an interval each; None: no sample.
    ``last``: the newest value (of a counter, too).
    """

    name: str
    unit: str
    words: str
    kind: str
    min: list[float | None]
    mean: list[float | None]
    max: list[float | None]
    last: float | None

    @property
    def least(self) -> float:
        """The least value shown."""
        return min((value for value in self.min if value is not None), default=0.0)

    @property
    def most(self) -> float:
        """The greatest value shown."""
        return max((value for value in self.max if value is not None), default=0.0)


@dataclass(frozen=True, slots=True)
class Channels:
    """A unit's channels.

    ``start``, ``end``: what is shown; None: the unit has no samples.
    ``constant``: those that did not.
    """

    start: datetime | None
    end: datetime | None
    series: list[ChannelSeries]
    constant: list[ChannelSeries]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the dataset tells of the fleet; replaced as a whole.

    ``places``: by unit.
    ``outcomes``: as :func:`serving.pages.alert_outcomes.outcomes_of` gives them.
    ``trouble``: why there are none, or none newer.
    """

    places: Mapping[str, Place] = field(default_factory=dict)
    outcomes: Mapping[str, Any] | None = None
    data_end: datetime | None = None
    made_at: datetime | None = None
    trouble: str | None = "the dataset is being read"


class DatasetReader:
    """Asks the reader processes.

    ``command``: begins a reader; ``facts`` or ``channels`` is put after it.
    ``watched``: files that change when there may be other facts.
    ``facts``: take it once a request.
    """

    def __init__(self, command: Sequence[str], watched: Sequence[Path]) -> None:
        self.facts = Facts()
        self._command = list(command)
        self._watched = list(watched)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="facts", daemon=True)
        self._lock = threading.Lock()
        self._asked: subprocess.Popen[bytes] | None = None
        self._asked_at = 0.0
        self._running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to look for facts, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and the processes."""
        self._stopped.set()
        for process in (self._running, self._asked):
            if process is not None:
                with contextlib.suppress(OSError):
                    process.kill()
        if self._thread.is_alive():
            self._thread.join(5)
        with self._lock:
            self._drop()

    def channels(self, node: str, unit: str) -> Channels:
        """Return a unit's channels; waits for the process, so call it in a thread.

        Raises ``InputError`` if the reader cannot answer; the next call starts another.
        """
        with self._lock:
            if self._stopped.is_set():
                raise InputError("the service is leaving", "dataset", "Ask again.")
            self._asked_at = time.monotonic()
            try:
                content = self._ask({"node": node, "unit": unit})
            except (OSError, ValueError) as error:
                self._drop()
                raise InputError(f"the dataset's reader does not answer: {error}", "dataset", "Ask again.") from error
        if "error" in content:
            raise InputError(str(content["error"]), "dataset", "Look after the dataset.")
        try:
            return channels_from(content)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"the dataset's reader answers nonsense: {error}", "dataset", "Ask again.") from error

    def _ask(self, question: Mapping[str, str]) -> dict[str, Any]:
        process = self._asked
        if process is None or process.poll() is not None:
            self._drop()
            process = self._asked = subprocess.Popen(  # noqa: S603 - our own command, no shell
                [*self._command, "channels"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        assert process.stdin is not None
        assert process.stdout is not None
        # The process is ended when it takes too long, which ends the reading below.
        timer = threading.Timer(_ANSWER_WITHIN_S, process.kill)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline(_LONGEST_ANSWER)
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            raise ValueError(f"it ended or took longer than {_ANSWER_WITHIN_S:g} s")
        content = json.loads(line)
        if not isinstance(content, dict):
            raise ValueError("no object")
        return content

    def _drop_idle(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                if self._asked is not None and time.monotonic() - self._asked_at > _IDLE_S:
                    self._drop()
            finally:
                self._lock.release()

    def _drop(self) -> None:
        process, self._asked = self._asked, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)

    def _run(self) -> None:
        seen: object = None
        again_at = next_at = 0.0
        while not self._stopped.is_set():
            began = time.monotonic()
            stamp = tuple(_stamp(path) for path in self._watched)
            changed = stamp != seen and began >= next_at
            if changed or (self.facts.trouble is not None and began >= again_at):
                seen, again_at = stamp, began + _AGAIN_AFTER_S
                try:
                    self.facts = self._read_facts()
                except (OSError, ValueError, KeyError, TypeError) as error:
                    if not self._stopped.is_set():
                        _LOG.warning("the dataset's facts cannot be had: %s", error)
                        before = self.facts
                        self.facts = Facts(
                            before.places, before.outcomes, before.data_end, before.made_at, str(error)[:500]
                        )
                # A ledger changes every minute: a large fleet's facts must not be read without end.
                next_at = time.monotonic() + _REST * (time.monotonic() - began)
            self._drop_idle()
            self._stopped.wait(_LOOK_EVERY_S)

    def _read_facts(self) -> Facts:
        with subprocess.Popen(  # noqa: S603 - our own command, no shell
            [*self._command, "facts"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            self._running = process
            assert process.stdout is not None
            assert process.stderr is not None
            complaints: list[bytes] = []
            thread = threading.Thread(target=_last_of, args=(process.stderr, complaints), daemon=True)
            thread.start()
            timer = threading.Timer(_FACTS_WITHIN_S, process.kill)
            timer.daemon = True
            timer.start()
            try:
                text = process.stdout.read(_LONGEST_ANSWER + 1)
                if len(text) > _LONGEST_ANSWER:
                    process.kill()
                code = process.wait()
                thread.join(5)
            finally:
                timer.cancel()
                self._running = None
        if code != 0:
            words = b"".join(complaints).decode("utf-8", "replace").strip().splitlines()
            raise ValueError(words[-1] if words else f"the reader ended with {code}")
        content = json.loads(text)
        return Facts(
            places_of(content["places"]),
            content["outcomes"],
            datetime.fromisoformat(content["data_end"]),
            datetime.fromisoformat(content["made_at"]),
            None,
        )


def _last_of(stream: IO[bytes], lines: list[bytes]) -> None:
    for line in iter(lambda: stream.readline(2**16), b""):
        lines[:] = [*lines[-19:], line]


def channels_from(content: Mapping[str, Any]) -> Channels:
    """Read what :func:`serving.pages.channels.channels_of` gives."""

    def instant(text: str | None) -> datetime | None:
        return None if text is None else datetime.fromisoformat(text)

    return Channels(
        instant(content["start"]),
        instant(content["end"]),
        [ChannelSeries(**fields) for fields in content["series"]],
        [ChannelSeries(**fields) for fields in content["constant"]],
    )


def _stamp(path: Path) -> object:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
