import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.slurm import expand_hostlist


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("gpu[01-04,07]", ["gpu01", "gpu02", "gpu03", "gpu04", "gpu07"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("gpu[098-101]-ib", ["gpu098-ib", "gpu099-ib", "gpu100-ib", "gpu101-ib"]),
        ("a[1-2]b[3,5]", ["a1b3", "a1b5", "a2b3", "a2b5"]),
        ("login1,gpu[1-2], x", ["login1", "gpu1", "gpu2", "x"]),
        ("rack-3.node-7.example", ["rack-3.node-7.example"]),
        ("", []),
    ],
)
def test_host_lists(written: str, names: list[str]):
    assert expand_hostlist(written) == names


@pytest.mark.parametrize(
    "written", ["n[1", "n1]", "n[[1]]", "n[3-1]", "n[a-b]", "n[]", "n[1-]", "n[0-9999999]", "a[1-2000]b[1-2000]"]
)
def test_what_is_no_host_list(written: str):
    with pytest.raises(ValueError, match=r"brackets|range|1,000,000"):
        expand_hostlist(written)


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 30), st.integers(1, 4)), min_size=1, max_size=5))
def test_ranges_against_counting(ranges: list[tuple[int, int, int]]):
    written = ",".join(f"{low:0{width}d}-{low + more:0{width}d}" for low, more, width in ranges)
    names = [f"n{low + step:0{width}d}" for low, more, width in ranges for step in range(more + 1)]
    assert expand_hostlist(f"n[{written}]") == names
