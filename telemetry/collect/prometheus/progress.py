"""Spans of time, and what a backfill remembers of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from pydantic import BaseModel


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


class BackfillProgress(BaseModel):
    """How far a backfill is.

    ``span_ms``: longest span that the server answers and that fits into memory; None until one did not.
    """

    done: list[Span] = []
    span_ms: int | None = None
    xid: dict[str, Any] = {}
