"""The window kernel against a plain reading of its rules."""

from datetime import timedelta

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from features.windows.blocks import RowSpans, blocks_of
from features.windows.layout import ChannelLayout
from features.windows.pane_index import Panes, PaneSpec
from features.windows.window_plan import WindowPlan
from telemetry.dataset.channels import CATALOGUE, Channel
from tests.features import window_oracle

MINUTE = timedelta(minutes=1)
WINDOWS = (10 * MINUTE, 30 * MINUTE, 50 * MINUTE)
LOOK_BACK = 2 * 50 * 60_000
DECLARED = {
    "odd_level": Channel("odd_level", "gauge", "", None, None, "declared"),
    "odd_total": Channel("odd_total", "counter", "", None, None, "declared"),
    "odd_bits": Channel("odd_bits", "flags", "", None, None, "declared"),
}
CHANNELS = {
    "gpu_temp_c": CATALOGUE["gpu_temp_c"],
    **{channel.name: channel for channel in CATALOGUE["gpu_temp_c"].rollups()},
    "power_w": CATALOGUE["power_w"],
    "row_remap_pending": CATALOGUE["row_remap_pending"],
    "ecc_sbe_volatile_total": CATALOGUE["ecc_sbe_volatile_total"],
    **{channel.name: channel for channel in CATALOGUE["ecc_sbe_volatile_total"].rollups()},
    "row_remap_correctable_total": CATALOGUE["row_remap_correctable_total"],
    "clocks_event_reasons": CATALOGUE["clocks_event_reasons"],
    "xid_last": CATALOGUE["xid_last"],
    **DECLARED,
}
TYPES = {"gauge": pa.float32(), "counter": pa.float64(), "flags": pa.uint64(), "enum": pa.int32()}


def block_of(samples: list[dict], channels=CHANNELS):
    columns = {
        "timestamp": pa.array([sample["time"] for sample in samples], pa.timestamp("ms", tz="UTC")),
        "node": pa.array(["n0"] * len(samples)),
        "gpu": pa.array(["g0"] * len(samples)),
    }
    for name, channel in channels.items():
        columns[name] = pa.array([sample.get(name) for sample in samples], TYPES[channel.kind])
    layout = ChannelLayout.of(channels)
    return layout, next(blocks_of(pa.table(columns), layout, unit="gpu"))


NO_PANES = PaneSpec(length=LOOK_BACK * 2, phase=0, look_back=LOOK_BACK)


def compute(samples: list[dict], borders: list[int], channels=CHANNELS, windows=WINDOWS, panes=NO_PANES):
    layout, block = block_of(samples, channels)
    plan = WindowPlan.telemetry(layout, windows)
    n = len(borders)
    spans = RowSpans(np.zeros(n, np.int64), np.full(n, len(samples)), np.array(borders, dtype=np.int64))
    out = np.full((n, len(plan.columns)), np.nan, dtype=np.float32)
    plan.fill(Panes(block, panes), spans, out)
    return plan.columns, out


def value_of(samples, border, name, **kwargs) -> float:
    columns, out = compute(samples, [border], **kwargs)
    (position,) = [i for i, column in enumerate(columns) if column.name == name]
    return float(out[0, position])


def _levels():
    return st.one_of(st.none(), st.floats(-1000, 1000, width=16), st.just(7.5))


@st.composite
def histories(draw):
    """One unit's samples at irregular times (several may share none), with nulls, roll-ups and counter resets."""
    times = sorted(draw(st.sets(st.integers(0, 200), max_size=40)))
    counter = 0.0
    samples = []
    for time in times:
        counter = draw(st.sampled_from([counter, counter, counter + 1, counter + 17_000, 0.0, counter / 2]))
        bits = st.one_of(st.none(), st.sampled_from([0, 1, 0x8, 0x20, 0xC0, 2**63]))
        sample = {
            "time": time * 60_000,
            "gpu_temp_c": draw(_levels()),
            "gpu_temp_c_min": draw(_levels()),
            "gpu_temp_c_max": draw(_levels()),
            "power_w": draw(_levels()),
            "row_remap_pending": draw(st.sampled_from([None, 0.0, 1.0])),
            "ecc_sbe_volatile_total": draw(st.sampled_from([None, counter])),
            "ecc_sbe_volatile_total_rise": draw(st.sampled_from([None, None, 3.0, 0.0])),
            "row_remap_correctable_total": counter,
            "clocks_event_reasons": draw(bits),
            "xid_last": draw(st.sampled_from([None, 0, 31, 79])),
            "odd_level": draw(_levels()),
            "odd_total": draw(st.sampled_from([None, counter])),
            "odd_bits": draw(bits),
        }
        samples.append(sample)
    return samples


def pane_specs():
    """Panes of one to forty minutes wherever they begin, and none at all."""
    reach = st.just(LOOK_BACK)
    drawn = st.builds(PaneSpec, st.integers(1, 40).map(lambda m: m * 60_000), st.integers(0, 600_000), reach)
    return st.one_of(st.just(NO_PANES), drawn)


@settings(max_examples=80, deadline=None)
@given(histories(), st.lists(st.integers(-5, 260), min_size=1, max_size=3), pane_specs())
def test_every_statistic_equals_the_plain_reading(samples, minutes, panes):
    if not samples:
        return
    borders = [minute * 60_000 for minute in minutes]
    columns, out = compute(samples, borders, panes=panes)
    for row, border in enumerate(borders):
        for i, column in enumerate(columns):
            expected = window_oracle.statistic(column, samples, border, LOOK_BACK, window_oracle.BITS)
            assert out[row, i] == pytest.approx(expected, rel=2e-6, abs=2e-5, nan_ok=True), column.name


@settings(max_examples=40, deadline=None)
@given(histories(), st.integers(0, 260), pane_specs())
def test_a_row_depends_on_nothing_outside_its_look_back(samples, minute, panes):
    border = minute * 60_000
    visible = [sample for sample in samples if 0 <= border - sample["time"] < LOOK_BACK]
    if not visible:
        return
    full, cut = compute(samples, [border], panes=panes)[1], compute(visible, [border], panes=panes)[1]
    assert full.tobytes() == cut.tobytes()


def test_the_spread_survives_a_high_level():
    rng = np.random.default_rng(1)
    noise = rng.normal(0, 1, 50)
    samples = [{"time": i * 60_000, "odd_total": None, "odd_level": 0.0, "x": 0.0} for i in range(50)]
    channels = {"x": Channel("x", "gauge", "", None, None, "")}
    for sample, shift in zip(samples, noise, strict=True):
        sample["x"] = np.float32(1e6 + shift)
    expected = np.std([float(sample["x"]) for sample in samples], ddof=1)
    assert value_of(samples, 49 * 60_000, "telemetry__x__std__50m", channels=channels) == pytest.approx(
        expected, rel=1e-6
    )


def counter(values):
    return [{"time": i * 600_000, "odd_total": value} for i, value in enumerate(values)]


def test_one_error_more_on_many_millions_shows():
    samples = counter([54_700_000_000.0, 54_700_000_001.0])
    assert value_of(samples, 600_000, "telemetry__odd_total__rise__10m") == 1.0


def test_levels_are_kept_only_where_they_persist_or_are_unknown():
    names = {column.name for column in compute(counter([1.0]), [0])[0]}
    assert "telemetry__row_remap_correctable_total__last__10m" in names
    assert "telemetry__odd_total__last__10m" in names
    assert "telemetry__ecc_sbe_volatile_total__last__10m" not in names


def test_blocks_keep_nodes_whole_and_follow_moves():
    table = pa.table(
        {
            "timestamp": pa.array([3, 1, 2, 4, 5], pa.timestamp("ms", tz="UTC")),
            "node": pa.array(["b", "a", "b", "a", "a"]),
            "gpu": pa.array(["g0", "g0", "g1", "g1", "g0"]),
            "power_w": pa.array([3.0, 1.0, 2.0, 4.0, 5.0], pa.float32()),
        }
    )
    layout = ChannelLayout.of({"power_w": CATALOGUE["power_w"]})
    blocks = list(blocks_of(table, layout, unit="gpu", block_samples=1))
    spans = [
        (pair, block.times[begin:end].tolist(), block.values[0, begin:end].tolist())
        for block in blocks
        for pair, (begin, end) in block.spans.items()
    ]
    assert len(blocks) == 2
    assert spans == [
        (("a", "g0"), [1, 5], [1.0, 5.0]),
        (("a", "g1"), [4], [4.0]),
        (("b", "g0"), [3], [3.0]),
        (("b", "g1"), [2], [2.0]),
    ]
