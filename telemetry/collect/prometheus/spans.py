"""Spans of time as half-open intervals of milliseconds, and which of them are still to be fetched.

A span (a, b] holds the samples after a and up to b, b included. Spans that share a bound therefore count each sample
once, whatever a server does at the bounds of a range selector: Prometheus before version 3 gives both, since then the
upper only, and VictoriaMetrics may leave out b itself, so what is asked for ends past it. All answers hold all of
(a, b].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Span(NamedTuple):
    """The time after ``after_ms`` and up to ``until_ms``, in milliseconds since 1970, UTC."""

    after_ms: int
    until_ms: int

    @property
    def length_ms(self) -> int:
        """Length in milliseconds."""
        return self.until_ms - self.after_ms

    def pieces(self, longest_ms: int) -> list[Span]:
        """Return the span cut in halves, and these again, until none is longer than ``longest_ms``."""
        if self.length_ms <= max(1, longest_ms):
            return [self]
        middle = (self.after_ms + self.until_ms) // 2
        halves = (Span(self.after_ms, middle), Span(middle, self.until_ms))
        return [piece for half in halves for piece in half.pieces(longest_ms)]


def chunks(whole: Span, chunk_ms: int) -> list[Span]:
    """Cut a span at the multiples of ``chunk_ms`` since 1970, so that later runs cut at the same instants.

    A span whose first instant is such a multiple, being one millisecond after its lower bound, begins a whole chunk.

    Examples
    --------
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
    for other in merged(done):
        if other.until_ms <= after:
            continue
        if other.after_ms >= span.until_ms:
            break
        if other.after_ms > after:
            left.append(Span(after, other.after_ms))
        after = max(after, other.until_ms)
    if after < span.until_ms:
        left.append(Span(after, span.until_ms))
    return left
