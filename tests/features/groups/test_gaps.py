"""Gaps and workload against plain readings."""

from datetime import timedelta

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from features.groups.gaps import GapPlan
from features.groups.workload import WorkloadPlan
from features.windows.blocks import RowSpans, SampleBlock, blocks_of
from features.windows.layout import ChannelLayout
from features.windows.pane_index import Panes, PaneSpec
from telemetry.dataset.channels import CATALOGUE
from tests.features.gaps_oracle import Asked, plain

MINUTE = timedelta(minutes=1)
WINDOWS = (20 * MINUTE, 60 * MINUTE)
LOOK_BACK = 120
CHANNELS = {
    "power_w": CATALOGUE["power_w"],
    "power_w_max": CATALOGUE["power_w"].rollups()[1],
    "gpu_util_pct": CATALOGUE["gpu_util_pct"],
    "pcie_replay_total": CATALOGUE["pcie_replay_total"],
    "clocks_event_reasons": CATALOGUE["clocks_event_reasons"],
}
LAYOUT = ChannelLayout.of(CHANNELS)
GAPS = GapPlan.of(LAYOUT, WINDOWS, step=10 * MINUTE, delay=10 * MINUTE, unit="gpu")
WORKLOAD = WorkloadPlan.of(LAYOUT, WINDOWS)
ASKED = Asked(
    windows=(20, 60),
    step=10,
    delay=10,
    watched=("power_w", "gpu_util_pct", "pcie_replay_total", "clocks_event_reasons"),
    gauges=("power_w", "gpu_util_pct"),
)


def block_of(samples):
    types = {"power_w": pa.float32(), "power_w_max": pa.float32(), "gpu_util_pct": pa.float32()}
    types |= {"pcie_replay_total": pa.float64(), "clocks_event_reasons": pa.uint64()}
    columns = {
        "timestamp": pa.array([sample["minute"] * 60_000 for sample in samples], pa.timestamp("ms", tz="UTC")),
        "node": pa.array(["n0"] * len(samples)),
        "gpu": pa.array(["g0"] * len(samples)),
        **{name: pa.array([sample.get(name) for sample in samples], kind) for name, kind in types.items()},
    }
    return next(blocks_of(pa.table(columns), LAYOUT, unit="gpu"), SampleBlock.empty(LAYOUT))


NO_PANES = PaneSpec(length=LOOK_BACK * 120_000, phase=0, look_back=LOOK_BACK * 60_000)


def compute(samples, border, since=-10_000, panes=NO_PANES):
    spans = RowSpans(np.array([0]), np.array([len(samples)]), np.array([border * 60_000]))
    gaps = np.full((1, len(GAPS.columns)), np.nan, dtype=np.float32)
    GAPS.fill(Panes(block_of(samples), panes), spans, np.array([since * 60_000]), gaps)
    work = np.full((1, len(WORKLOAD.columns)), np.nan, dtype=np.float32)
    WORKLOAD.fill(Panes(block_of(samples), panes), spans, work)
    names = [column.name for column in (*GAPS.columns, *WORKLOAD.columns)]
    return dict(zip(names, [*gaps[0].tolist(), *work[0].tolist()], strict=True))


@st.composite
def histories(draw):
    levels = st.sampled_from([None, 0.0, 3.0, 50.0, 90.0])
    return [
        {
            "minute": minute,
            "power_w": draw(levels),
            "power_w_max": draw(st.sampled_from([None, 95.0])),
            "gpu_util_pct": draw(levels),
            "pcie_replay_total": draw(st.sampled_from([None, 1.0])),
            "clocks_event_reasons": draw(st.sampled_from([None, 0, 8])),
        }
        for minute in sorted(draw(st.sets(st.integers(0, 150), max_size=25)))
    ]


def pane_specs():
    """Panes of one to forty minutes wherever they begin, and none at all."""
    reach = st.just(LOOK_BACK * 60_000)
    drawn = st.builds(PaneSpec, st.integers(1, 40).map(lambda m: m * 60_000), st.integers(0, 600_000), reach)
    return st.one_of(st.just(NO_PANES), drawn)


@settings(max_examples=200, deadline=None)
@given(histories(), st.integers(-5, 300), st.integers(-200, 200), pane_specs())
def test_gaps_and_workload_equal_the_plain_reading(samples, border, since, panes):
    computed, expected = compute(samples, border, since, panes), plain(samples, border, since, ASKED)
    for name, value in expected.items():
        assert computed[name] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), name


def test_no_workload_without_utilisation_or_power():
    assert WorkloadPlan.of(ChannelLayout.of({"gpu_temp_c": CATALOGUE["gpu_temp_c"]}), WINDOWS).columns == ()


@settings(max_examples=100, deadline=None)
@given(histories(), st.integers(0, 300), pane_specs())
def test_a_row_depends_on_nothing_outside_its_look_back(samples, border, panes):
    visible = [sample for sample in samples if 0 <= border - sample["minute"] < LOOK_BACK]
    full, cut = compute(samples, border, panes=panes), compute(visible, border, panes=panes)
    np.testing.assert_array_equal(list(full.values()), list(cut.values()))
