"""Lines of the two text formats, and pages whose faulty lines do not cost the others."""

from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.collect.series.exposition import BAD_LINE, LineReader, is_openmetrics, parse_line


@pytest.mark.parametrize(
    ("line", "openmetrics", "sample"),
    [
        ("x 1", False, ("x", {}, 1.0, None)),
        ('x{a="b c",d="}"} NaN 1700000000123', False, ("x", {"a": "b c", "d": "}"}, "nan", 1700000000123)),
        ('x{a="b"} 1 1700000000.5', True, ("x", {"a": "b"}, 1.0, 1700000000500)),
        (r'x{a="q\"\\\n"} +Inf', False, ("x", {"a": 'q"\\\n'}, "inf", None)),
        ('{"a.b",c="d"} 5', False, ("a.b", {"c": "d"}, 5.0, None)),
        ('x_total{a="b"} 3 # {trace="} 1"} 0.5 1700000000.5', True, ("x_total", {"a": "b"}, 3.0, None)),
        ('x{a="b # {c}"} 1', True, ("x", {"a": "b # {c}"}, 1.0, None)),
    ],
)
def test_lines_are_read(line: str, openmetrics: bool, sample: tuple[object, ...]) -> None:
    read_sample = parse_line(line, openmetrics=openmetrics)
    assert read_sample is not None
    value = read_sample.value if isinstance(sample[2], float) else str(read_sample.value)
    assert (read_sample.name, read_sample.labels, value, read_sample.timestamp_ms) == sample


@pytest.mark.parametrize("line", ["", "  ", "# HELP x text", "# EOF"])
def test_comments_and_blanks_are_no_samples(line: str) -> None:
    assert parse_line(line) is None


@pytest.mark.parametrize(
    "line", ["x", 'x{a="b', "x abc", "1x 3", 'x{a="1",a="2"} 3', "x 1_000", 'x{a="b"} 1 2 3', "<html> 1", "x 1 nan"]
)
def test_what_is_no_line_of_the_format(line: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_line(line)


def test_the_format_is_known_by_the_end_mark() -> None:
    assert is_openmetrics("x 1\n# EOF\n")
    assert is_openmetrics("x 1\n# EOF")
    assert not is_openmetrics("x 1\n# EOF is not here\n")
    assert not is_openmetrics("x 1\n")


def read(parser: LineReader[tuple[str, str]], page: str) -> tuple[list[object], Counter[str]]:
    problems: Counter[str] = Counter()
    rows = list(parser.read(page.split("\n"), openmetrics=False, problems=problems))
    return rows, problems


def test_a_faulty_line_does_not_cost_the_others_and_a_known_series_is_identified_once() -> None:
    asked = []

    def identify(name: str, labels: dict[str, str]) -> tuple[str, str]:
        asked.append(name)
        return name, labels.get("gpu", "")

    parser = LineReader(identify)
    page = 'x{gpu="0"} 1\nx{gpu="1" 2\ny{gpu="0"} 3 1772323200017\nx{gpu="2"} 4 # {t="a"} 5\n'
    first = [(("x", "0"), 1.0, None), (("y", "0"), 3.0, 1_772_323_200_017), (("x", "2"), 4.0, None)]
    assert read(parser, page) == (first, Counter({BAD_LINE: 1}))
    again, _ = read(parser, page.replace("1\n", "8\n", 1))
    assert again == [(("x", "0"), 8.0, None), *first[1:]]
    assert asked.count("x") == 3  # once, and the line with an exemplar each time


def test_what_is_remembered_is_bounded_in_bytes() -> None:
    parser = LineReader(lambda name, labels: (name, labels["gpu"]), max_bytes=2000)
    for number in range(200):
        rows, _ = read(parser, f'x{{gpu="{number}",pod="{"p" * 500}"}} {number}')
        assert rows == [(("x", str(number)), float(number), None)]
    assert sum(map(len, parser._known)) <= 2000


HEADS = st.sampled_from(['x{a="b"}', 'x{a="c",pod="x y 1 2"}', 'x{a="b c",pod="} 1 1772323200"}', 'x{a="b', "x"])
VALUES = st.floats().map(repr) | st.sampled_from(
    ["NaN", "+Inf", "1_0", "0x10", "infinity", "1e3", "1E-3", "+5", "", "x", ".5", "5.", str(-(10**20))]
)
TIMES = st.integers(0, 10**6).map(lambda us: f"1772323200.{us:06d}") | st.sampled_from(
    ["", "1772323200", "1772323200.5e0", "1_772323200", "NaN", "12 # {} 1", '1772323200 # {a="b"} 2 3']
)
COMMENTS = st.sampled_from(["# TYPE a gauge", "# EOF", "  ", "\t"])


@given(st.lists(st.tuples(HEADS, VALUES, TIMES).map(" ".join) | COMMENTS, max_size=8))
def test_lines_of_known_series_are_read_as_single_lines(lines: list[str]) -> None:
    lines = [*lines, *lines]  # the second time from what is remembered
    expected = []
    for line in lines:
        with suppress(ValueError):
            sample = parse_line(line, openmetrics=True)
            if sample is not None and sample.timestamp_ms in (None, *range(1_772_323_200_000, 1_772_323_201_001)):
                expected.append(((sample.name, sample.labels), sample.value, sample.timestamp_ms))
    reader = LineReader(lambda name, labels: (name, labels))
    assert str(list(reader.read(lines, openmetrics=True, problems=Counter()))) == str(expected)
