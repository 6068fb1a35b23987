"""Spans: cut, put together and taken out, no millisecond counts twice or is lost."""

from hypothesis import given
from hypothesis import strategies as st

from telemetry.collect.prometheus.progress import Span, chunks, without

spans = st.tuples(st.integers(-50, 200), st.integers(1, 80)).map(lambda pair: Span(pair[0], pair[0] + pair[1]))


def instants(pieces: list[Span]) -> list[int]:
    return [ms for piece in pieces for ms in range(piece.after_ms + 1, piece.until_ms + 1)]


@given(spans, st.integers(2, 40))
def test_chunks_and_halves_hold_each_instant_once(span: Span, size: int) -> None:
    assert instants(chunks(span, size)) == instants([span])
    assert instants(list(span.halves())) == instants([span])


def test_a_start_on_a_multiple_makes_no_chunk_of_one_millisecond() -> None:
    assert chunks(Span(99, 300), 100) == [Span(99, 200), Span(200, 300)]


@given(spans, st.lists(spans, max_size=6))
def test_what_is_left_is_what_is_not_done(span: Span, done: list[Span]) -> None:
    assert instants(without(span, done)) == sorted(set(instants([span])) - set(instants(done)))
