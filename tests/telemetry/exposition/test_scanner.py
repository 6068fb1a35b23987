"""The scanner reads what the grammar reads, page after page, and holds what it is told to hold at most."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.exposition.grammar import parse_line
from telemetry.exposition.scanned import (
    AFTER_END,
    CUT,
    NO_END,
    NOT_UTF8,
    TOO_LONG,
    TOO_MANY_LINES,
    TOO_MANY_SERIES,
)
from telemetry.exposition.scanner import NO_TIMESTAMP, Limits, Scanned, Scanner
from telemetry.exposition.tokens import GrammarError
from tests.telemetry.exposition.page_texts import odd_lines, open_lines, page, plain_lines

Found = list[tuple[str, dict[str, str], float, int]]


def by_grammar(lines: list[str], *, openmetrics: bool) -> tuple[Found, Counter[str]]:
    """What the slow parser makes of lines that each have their line end: the oracle."""
    samples: Found = []
    problems: Counter[str] = Counter()
    ended = False
    for line in lines:
        text = line.removesuffix("\r")
        if ended:
            problems[AFTER_END] += 1
        elif openmetrics and text == "# EOF":
            ended = True
        else:
            try:
                sample = parse_line(text, openmetrics=openmetrics)
            except GrammarError as error:
                problems[error.reason] += 1
                continue
            if sample is not None:
                stamp = NO_TIMESTAMP if sample.timestamp_ms is None else sample.timestamp_ms
                samples.append((sample.name, sample.labels, sample.value, stamp))
    if openmetrics and not ended:
        problems[NO_END] += 1
    return samples, problems


def by_scanner(scanner: Scanner, scanned: Scanned) -> Found:
    stamps = scanned.timestamps_ms
    times = [NO_TIMESTAMP] * len(scanned.keys) if stamps is None else stamps.tolist()
    assert len(scanned.keys) == len(scanned.values) == len(scanned.texts)
    return [
        (*scanner.labels(key), value, stamp)
        for key, value, stamp in zip(scanned.keys, scanned.values.tolist(), times, strict=True)
    ]


def assert_same(ours: Found, theirs: Found) -> None:
    assert [each[:2] for each in ours] == [each[:2] for each in theirs]
    assert [each[3] for each in ours] == [each[3] for each in theirs]
    np.testing.assert_array_equal([each[2] for each in ours], [each[2] for each in theirs])


pages_of_lines = st.lists(st.one_of(plain_lines(), plain_lines(), open_lines(), odd_lines()), max_size=8)


@settings(max_examples=100, deadline=None)
@given(st.lists(pages_of_lines, min_size=1, max_size=3), st.booleans())
def test_pages_are_read_as_the_grammar_reads_them(pages: list[list[str]], openmetrics: bool) -> None:
    scanner = Scanner()
    for lines in [*pages, *pages]:  # known series and known layouts the second time
        whole = [*lines, "# EOF"] if openmetrics else lines
        # A bare \r before the line end would make it CRLF; a \r elsewhere is a character like any other.
        scanned = scanner.scan("".join(f"{line}\n" for line in whole).encode(), openmetrics=openmetrics)
        samples, problems = by_grammar(whole, openmetrics=openmetrics)
        assert_same(by_scanner(scanner, scanned), samples)
        assert scanned.problems == dict(problems)
        assert scanned.complete


number_texts = st.one_of(
    st.floats(allow_nan=False).map(repr),
    st.integers(-(10**25), 10**25).map(str),
    st.sampled_from(
        ["", "NaN", "nan", "+nan", "-NaN", "inf", "+Inf", "-Inf", "Infinity", "1e5", "1_0", "0x1", "e", "-"]
    ),
    st.sampled_from(["1 2", " 1", "1 ", "1\x0b", "1\x00", "9" * 60, "9" * 401, "1.", ".", "1e", "١"]),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(number_texts, number_texts), min_size=1, max_size=4))
def test_only_the_numbers_change_from_page_to_page(pages: list[tuple[str, str]]) -> None:
    scanner = Scanner()
    scanner.scan(b'# HELP a costs 1\na{b="c"} 1\nd 2\n')
    for first, second in pages:
        lines = ["# HELP a costs 1", f'a{{b="c"}} {first}', f"d {second}"]
        scanned = scanner.scan("".join(f"{line}\n" for line in lines).encode(), openmetrics=False)
        samples, problems = by_grammar(lines, openmetrics=False)
        assert_same(by_scanner(scanner, scanned), samples)
        assert scanned.problems == dict(problems)


def test_commas_and_signs_inside_label_values_do_not_divide_them() -> None:
    scanner = Scanner()
    body = b'a{b=",",c="=",d="{e=f}, "} 1\n:{A=","} 2 3\n'
    for _ in range(2):
        scanned = scanner.scan(body)
        assert [scanner.labels(key) for key in scanned.keys] == [
            ("a", {"b": ",", "c": "=", "d": "{e=f}, "}),
            (":", {"A": ","}),
        ]


def test_a_longer_comment_is_not_taken_for_the_number_that_is_missing() -> None:
    scanner = Scanner()
    scanner.scan(b"# HELP a costs 1\na 1\nd 2\n")
    scanned = scanner.scan(b"# HELP a costs 12\na \nd 3\n")
    assert scanned.values.tolist() == [3.0]
    assert sum(scanned.problems.values()) == 1


def test_the_keys_are_the_same_object_while_the_page_lists_the_same_series() -> None:
    scanner = Scanner()
    first = scanner.scan(page([[1, 2, 3], [4, 5, 6]]))
    again = scanner.scan(page([[7, 8, 9], [10, 11.5, "NaN"]]))
    assert again.keys is first.keys
    assert again.values.tolist()[:5] == [7, 10, 8, 11.5, 9]
    stamped = scanner.scan(page([[7, 8, 9], [10, 11, "12 1700000000000"]]))
    assert stamped.keys is first.keys
    assert stamped.timestamps_ms is not None
    assert stamped.timestamps_ms.tolist() == [NO_TIMESTAMP] * 5 + [1700000000000]


def test_blocks_of_a_page_may_change_places() -> None:
    one, two = (
        page([[1, 2, 3]]),
        page([[4, 5, 6]], ("DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_MEM_CLOCK", "DCGM_FI_DEV_FB_USED")),
    )
    scanner = Scanner()
    seen = [scanner.scan(body).values.tolist() for body in (one + two, two + one, one + two, two + one)]
    assert seen == [[1, 2, 3, 4, 5, 6], [4, 5, 6, 1, 2, 3]] * 2


def test_a_page_that_is_cut_says_so_and_keeps_its_whole_lines() -> None:
    body = page([[31, 250.5, 0]])
    lines = body.split(b"\n")
    whole = Scanner().scan(body)
    for end in range(len(body)):
        scanned = Scanner().scan(body[:end], whole=False)
        read = body[:end].count(b"\n")
        expected = sum(not line.startswith(b"#") for line in lines[:read])
        assert len(scanned.keys) == expected
        assert scanned.values.tolist() == whole.values.tolist()[:expected]
        assert not scanned.complete
        assert scanned.problems == ({} if body[:end].endswith(b"\n") or not end else {CUT: 1})


def test_a_last_line_without_line_end_counts_if_it_parses_and_the_body_was_whole() -> None:
    assert Scanner().scan(b"a 1\nb 2").complete
    assert Scanner().scan(b"a 1\nb 2").values.tolist() == [1, 2]
    cut = Scanner().scan(b'a 1\nb{c="d')
    assert (cut.values.tolist(), cut.complete, cut.problems) == ([1], False, {CUT: 1})
    assert Scanner().scan(b"a 1\n", whole=False).complete is False
    assert Scanner().scan(b"").complete


def test_an_openmetrics_page_is_complete_with_its_end_only() -> None:
    assert Scanner().scan(b"a 1\n# EOF\n", openmetrics=True).complete
    assert Scanner().scan(b"a 1\n# EOF", openmetrics=True).complete
    for body in (b"a 1\n", b"", b"a 1\nb 2"):
        scanned = Scanner().scan(body, openmetrics=True)
        assert not scanned.complete
        assert scanned.problems[NO_END] == 1
    after = Scanner().scan(b"a 1\n# EOF\nb 2\n")
    assert (after.is_openmetrics, after.values.tolist(), after.problems) == (True, [1], {AFTER_END: 1})
    scanner = Scanner()
    for _ in range(2):
        assert scanner.scan(b"a 1\nb 2\n# EOF\n", openmetrics=True).complete
    assert not scanner.scan(b"a 1\nb 2\n# EO\n", openmetrics=True).complete
    assert not scanner.scan(b"a 1\nb 2\n", openmetrics=True).complete


def test_a_line_that_cannot_be_read_does_not_lose_the_others() -> None:
    scanned = Scanner().scan(b'a 1\nb{ 2\nc{d="\xff"} 3\ne 0x4\nf 0x5\ng 6\n')
    assert scanned.values.tolist() == [1, 6]
    assert scanned.problems == {"no label name": 1, NOT_UTF8: 1, "value is no number": 2}
    assert scanned.complete


def test_a_line_that_stays_wrong_stays_a_problem() -> None:
    scanner = Scanner()
    body = b"# TYPE a nonsense\na %d\nb 0x1\nc 2\n"
    expected = {"unknown metric type": 1, "value is no number": 1}
    first = scanner.scan(body % 1)
    for number in (2, 3):
        scanned = scanner.scan(body % number)
        assert (scanned.values.tolist(), scanned.problems) == ([number, 2], expected)
        assert scanned.keys is first.keys
    repaired = scanner.scan(body.replace(b"0x1", b"5") % 4)
    assert (repaired.values.tolist(), repaired.problems) == ([4, 5, 2], {"unknown metric type": 1})


def test_a_format_change_does_not_carry_series_over_that_the_other_format_refuses() -> None:
    scanner = Scanner()
    assert scanner.scan(b'a{b="c",} 1\nd 2\n').values.tolist() == [1, 2]
    scanned = scanner.scan(b'a{b="c",} 1\nd 2\n# EOF\n')
    assert (scanned.values.tolist(), scanned.problems) == ([2], {"no label name": 1})


def test_lines_over_the_limits_are_left_out_and_counted() -> None:
    limits = Limits(lines=10, series=1000, line_bytes=50)
    body = b"".join(b"m%d 1\n" % number for number in range(25))
    assert len(Scanner(limits).scan(body).keys) == 10
    assert Scanner(limits).scan(body).problems == {TOO_MANY_LINES: 15}
    assert Scanner(limits).scan(body[:-1]).problems == {TOO_MANY_LINES: 15}
    assert Scanner(limits).scan(body).complete
    exactly = Scanner(limits).scan(body[: 5 * 10])
    assert (len(exactly.keys), exactly.problems) == (10, {})
    assert Scanner(limits).scan(body + b"# EOF\n").complete
    long = Scanner(limits).scan(b'a 1\nb{c="' + b"x" * 60 + b'"} 2\nd 3\n')
    assert (long.values.tolist(), long.problems) == ([1, 3], {TOO_LONG: 1})


def test_ever_new_labels_neither_fill_the_memory_nor_lose_the_series_that_stay() -> None:
    limits = Limits(series=100)
    scanner = Scanner(limits)
    steady = b"".join(b'gpu{n="%d"} 7\n' % number for number in range(10))
    lost = 0
    for turn in range(60):
        bomb = b"".join(b'pod{id="%d"} 1\n' % (turn * 50 + number) for number in range(50))
        scanned = scanner.scan(steady + bomb)
        names = [scanner.labels(key)[0] for key in scanned.keys]
        assert names[:10] == ["gpu"] * 10
        assert len(names) + scanned.problems.get(TOO_MANY_SERIES, 0) == 60
        assert len(scanner._series.keys) <= limits.series
        lost += scanned.problems.get(TOO_MANY_SERIES, 0)
    assert lost > 0


def test_a_page_with_more_series_than_the_limit_keeps_the_first() -> None:
    scanner = Scanner(Limits(series=5))
    body = b"".join(b"m%d %d\n" % (number, number) for number in range(8))
    for _ in range(30):
        scanned = scanner.scan(body)
        assert scanned.values.tolist() == [0, 1, 2, 3, 4]
        assert scanned.problems == {TOO_MANY_SERIES: 3}
    assert Scanner(Limits(series_bytes=20)).scan(b"aaaaaaaaaaaa 1\nbbbbbbbbbbbb 2\nc 3\n").values.tolist() == [1, 3]


def test_keys_are_never_given_again() -> None:
    scanner = Scanner(Limits(series=2))
    old = scanner.scan(b"a 1\nb 2\n").keys[0]
    new = scanner.scan(b"c 1\nd 2\n").keys
    assert [scanner.labels(key)[0] for key in new] == ["c", "d"]
    with pytest.raises(KeyError):
        scanner.labels(old)


def test_a_page_of_a_million_lines_costs_little_more_than_itself() -> None:
    body = b'm{a="b"} 1\n' * 1_000_000
    scanner = Scanner()
    tracemalloc.start()
    try:
        scanned = scanner.scan(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert scanned.problems == {TOO_MANY_LINES: 950_000}
    assert peak < 3 * len(body)
