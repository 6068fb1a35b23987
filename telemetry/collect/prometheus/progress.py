"""Spans of time, and what a backfill remembers of them, so that a killed one goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, PrivateAttr

from telemetry.atomic import write_bytes
from telemetry.collect.series.mapping import SourceMapping
from telemetry.dataset.channels import Channel, channel_as_dict
from telemetry.errors import InputError


class Span(NamedTuple):
    """The time after ``after_ms`` and up to ``until_ms``, in milliseconds since 1970, UTC."""

    after_ms: int
    until_ms: int

    @property
    def length_ms(self) -> int:
        """Length in milliseconds."""
        return self.until_ms - self.after_ms

    def halves(self) -> tuple[Span, Span]:
        """Return the span cut in the middle."""
        middle = (self.after_ms + self.until_ms) // 2
        return Span(self.after_ms, middle), Span(middle, self.until_ms)


def chunks(whole: Span, chunk_ms: int) -> list[Span]:
    """Cut a span at the multiples of ``chunk_ms`` since 1970, so that later runs cut at the same instants.

    A span whose first instant is such a multiple, being one millisecond after its lower bound, begins a whole chunk.

    >>> chunks(Span(5, 23), 10)
    [Span(after_ms=5, until_ms=10), Span(after_ms=10, until_ms=20), Span(after_ms=20, until_ms=23)]
    """
    made = []
    after = whole.after_ms
    while after < whole.until_ms:
        until = min(whole.until_ms, ((after + 1) // chunk_ms + 1) * chunk_ms)
        made.append(Span(after, until))
        after = until
    return made


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the same time as few spans, sorted."""
    made: list[Span] = []
    for span in sorted(spans):
        if made and span.after_ms <= made[-1].until_ms:
            made[-1] = Span(made[-1].after_ms, max(made[-1].until_ms, span.until_ms))
        else:
            made.append(span)
    return made


def without(span: Span, done: Iterable[Span]) -> list[Span]:
    """Return what is left of a span when the time of others is taken out, sorted."""
    left = []
    after = span.after_ms
    for other in sorted(done):
        left.append(Span(after, min(other.after_ms, span.until_ms)))
        after = max(after, other.until_ms)
    return [part for part in [*left, Span(after, span.until_ms)] if part.length_ms > 0]


def job_id(url: str, match: str, mapping: SourceMapping, channels: Mapping[str, Channel]) -> str:
    """Return a name for all that decides which rows a span of time gives: 16 hexadecimal digits."""
    rules = {
        "url": url,
        "match": match,
        "mapping": mapping.model_dump(mode="json"),
        "channels": [channel_as_dict(channel) for channel in channels.values()],
    }
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()[:16]


class Progress(BaseModel):
    """How far a job is; kept in a small file, written after each span is staged.

    ``span_ms``: longest span that the server answers and that fits into memory; None until one did not.
    """

    version: Literal[1] = 1
    done: list[Span] = []
    span_ms: int | None = None
    xid: dict[str, Any] = {}
    _path: Path = PrivateAttr()

    @classmethod
    def read(cls, path: Path) -> Progress:
        """Return what was remembered; nothing where there is no file. Raises ``InputError`` if it is damaged."""
        try:
            progress = cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            progress = cls()
        except ValueError as error:
            raise InputError(
                f"the progress file is damaged: {str(error).splitlines()[-1].strip()}",
                str(path),
                "Remove it: the time is then fetched again, and what has landed is not doubled.",
            ) from error
        progress._path = path
        return progress

    def finish(self, span: Span) -> None:
        """Note that a span has landed, and save."""
        self.done = merged([*self.done, span])
        self.save()

    def save(self) -> None:
        """Write the file, wholly or not at all."""
        write_bytes(self._path, self.model_dump_json().encode())
