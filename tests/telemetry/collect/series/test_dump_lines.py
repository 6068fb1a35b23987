"""The fast reader of dumps against the parser of single lines."""

import math
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.collect.openmetrics.lines import DumpReader
from telemetry.collect.series.exposition import parse_line
from telemetry.collect.series.identity import Series, SeriesCatalogue
from telemetry.dataset.channels import CATALOGUE

HEADS = st.sampled_from(
    [
        'DCGM_FI_DEV_GPU_TEMP{UUID="a",Hostname="n"}',
        'DCGM_FI_DEV_GPU_TEMP{UUID="b",Hostname="n",pod="x y 1 2"}',
        'DCGM_FI_DEV_XID_ERRORS{UUID="a b",Hostname="n",pod="} 1 1772323200"}',
        'DCGM_FI_DEV_GPU_TEMP{UUID="a',
        "acme",
    ]
)
VALUES = st.one_of(
    st.floats().map(repr),
    st.integers(-(10**20), 10**20).map(str),
    st.sampled_from(["NaN", "+Inf", "-Inf", "1_0", "0x10", "infinity", "1e3", "1E-3", "+5", "", "x", ".5", "5."]),
)
TIMES = st.one_of(
    st.integers(1_772_323_200, 1_772_323_300).map(str),
    st.integers(0, 10**6).map(lambda us: f"1772323200.{us:06d}"),
    st.sampled_from(["1772323200.5e0", "1.7723232e9", "1_772323200", "NaN", "12 # {} 1", '1772323200 # {a="b"} 2 3']),
)
LINES = st.lists(
    st.one_of(
        st.tuples(HEADS, VALUES, TIMES).map(" ".join),
        st.tuples(HEADS, VALUES).map(" ".join),
        st.sampled_from(["# TYPE a gauge", "# HELP b c", "# EOF", "  ", "\t"]),
    ),
    max_size=12,
)


def slow(lines: list[str]) -> list[tuple[str, str, int, float]]:
    found = []
    catalogue = SeriesCatalogue(CATALOGUE)
    for line in lines:
        try:
            sample = parse_line(line.strip(), openmetrics=True)
        except ValueError:
            continue
        if sample is None or sample.timestamp_ms is None:
            continue
        series = catalogue.identify(sample.name, sample.labels)
        if isinstance(series, Series) and 946_684_800_000 <= sample.timestamp_ms < 7_258_118_400_000:
            found.append((series.channel, series.gpu, sample.timestamp_ms, sample.value))
    return sorted(found, key=str)


@settings(max_examples=100, deadline=None)
@given(LINES)
def test_samples_are_those_of_single_lines(lines: list[str]) -> None:
    first = 'DCGM_FI_DEV_GPU_TEMP{UUID="z",Hostname="n"} 1 1772323200'  # tells that time stamps are seconds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "d.om"
        path.write_text("\n".join([first, *lines]) + "\n")
        reader = DumpReader(path, SeriesCatalogue(CATALOGUE))
        found = []
        for block in reader.blocks():
            assert block.values.dtype == np.float64
            for number, ms, value in zip(block.index, block.ms, block.values, strict=True):
                series = reader.series[number]
                assert isinstance(series, Series)
                found.append((series.channel, series.gpu, int(ms), float(value)))
    expected = slow([first, *lines])
    assert [str(each) for each in sorted(found, key=str)] == [str(each) for each in expected]
    assert reader.lines == len(lines) + 1
    assert all(not math.isnan(ms) for _, _, ms, _ in found)
