"""Counters that rise faster than any device counts, and samples that say that a GPU is lost."""

from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.accounting import Accounting
from telemetry.collect.openmetrics import stage_dump
from telemetry.collect.series.identity import SeriesCatalogue
from telemetry.dataset.channels import CATALOGUE
from telemetry.importing.samples.instrument_rules import RULES
from telemetry.importing.samples.instruments import DEAD_CHANNEL
from telemetry.importing.samples.rollup import IMPOSSIBLE_RISE, impossible_rises
from telemetry.staging.folder import StagingFolder
from tests.telemetry.helpers import all_samples, gpu, inventory_frame, run_import, samples_frame


@pytest.mark.parametrize(
    "garbage",
    [
        3_000_000_000,
        4_200_000_000,
        2**40,
        4294967295,
        "4294967295",
        4294967296.0,
        18446744073709551615,
        2147483632,
        "0xFFFFFFFF",
        9223372036854775794,
        "[Unknown Error]",
    ],
)
def test_garbage_in_a_counter_is_no_value_and_no_reset_follows(tmp_path: Path, garbage: object) -> None:
    frame = samples_frame(gpus=1, times=12, every="5min").astype(object)
    frame["pcie_replay_total"] = [3, 3, 3, garbage, 6, 6, 6, 6, 7, 7, 7, 7]
    result = run_import(tmp_path, samples=frame)
    rows = all_samples(result)
    assert rows["pcie_replay_total"].max() == 7
    assert rows["pcie_replay_total_rise"].sum() == 4


def test_a_counter_that_stays_garbage_for_long_is_garbage_for_long(tmp_path: Path) -> None:
    frame = samples_frame(gpus=1, times=30)
    frame["ecc_dbe_volatile_total"] = [0] * 5 + [3_500_000_000] * 20 + [1] * 5
    result = run_import(tmp_path, samples=frame, max_loss=1.0)
    assert all_samples(result)["ecc_dbe_volatile_total"].dropna().tolist() == [0] * 5 + [1] * 5
    assert result.quarantined == {IMPOSSIBLE_RISE: 20}


@pytest.mark.parametrize("name", RULES.lasting_counters.channels)
def test_a_lasting_counter_that_returns_from_zero_has_not_risen(tmp_path: Path, name: str) -> None:
    frame = samples_frame(gpus=1, times=12, every="5min").astype(object)
    frame[name] = [5, 5, 0, 5, 0, 0, 0, 0, 7, 7, 0, 7]
    result = run_import(tmp_path, samples=frame)
    rows = all_samples(result)
    assert rows[name].fillna(-1).tolist() == [5, 5, 5, -1, 7, 7, 7]
    assert rows[f"{name}_rise"].sum() == 2
    assert result.accounting.tables["sample values"].left_out[DEAD_CHANNEL] == 6


@pytest.mark.parametrize(("kind", "spelled"), [("csv", str.upper), ("parquet", str.upper), ("csv", str.lower)])
def test_links_of_a_gpu_are_summed_unless_the_table_has_their_total(tmp_path, kind, spelled):
    frame = samples_frame(gpus=1, times=4)
    names = "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT", "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT"
    for name, (link, last) in product(names, ((0, 9), (1, None), (17, 7))):
        frame[f"{name}_L{link}"] = [0, 1, 2, last]
    total = spelled(f"{names[1]}_TOTAL")
    frame[total] = 4
    path = tmp_path / f"samples.{kind}"
    frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
    mapping = f"samples: {{columns: {{{total}: nvlink_replay_total}}}}"
    rows = all_samples(run_import(tmp_path, samples=[path], mapping=mapping))
    assert rows["nvlink_crc_flit_total"].tolist() == [0, 3, 6, 18]
    assert rows["nvlink_replay_total"].tolist() == [4] * 4


@pytest.mark.parametrize(
    ("link_0", "link_3", "totals"),
    [
        ([1, 2, 2, 4], [40, None, 41, 41], [41, 42, 43, 45]),
        ([1, 2, 2, 4], [None, 40, None, None], [41, 42, 42, 44]),
        ([5, 6, 1, 2], [40, 40, None, 3], [45, 46, 1, 5]),
    ],
    ids=["once", "first and last", "in a restart"],
)
@pytest.mark.parametrize("way", ["table", "dump", "small parts of a dump"])
def test_a_link_that_is_missing_from_a_row_keeps_its_value(tmp_path, link_0, link_3, totals, way):
    name = "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT"
    links = {f"{name}_L0": link_0, f"{name}_L3": link_3}
    if way == "table":
        frame = samples_frame(gpus=2, times=4)
        for column, values in links.items():
            frame[column] = pd.array(values * 2, "Int64")
        rows = all_samples(run_import(tmp_path, samples=frame))
    else:
        if way != "dump" and link_3[0] is None:
            pytest.skip("the first value of the link is in a later part")
        lines = [
            f'{column}{{UUID="{gpu(number)}",Hostname="n{number}"}} {value} {1_793_491_200 + 600 * turn}'
            for turn in range(4)
            for number in range(2)
            for column, values in links.items()
            if (value := values[turn]) is not None
        ]
        (tmp_path / "dump.om").write_text("\n".join([*lines, "# EOF", ""]))
        staging = StagingFolder(tmp_path / "fleet.live", writer="openmetrics", channels=CATALOGUE)
        stage_dump(
            tmp_path / "dump.om",
            staging,
            SeriesCatalogue(CATALOGUE),
            accounting=Accounting(),
            held_samples=2_000_000 if way == "dump" else 4,
        )
        files = sorted((tmp_path / "fleet.live/samples").glob("*.parquet"))
        rows = pd.concat([pd.read_parquet(file) for file in files]).sort_values(["gpu", "timestamp"])
    assert rows["nvlink_crc_flit_total"].tolist() == totals * 2


def test_a_burst_of_corrected_errors_is_believed(tmp_path: Path) -> None:
    frame = samples_frame(gpus=1, times=4)
    frame["ecc_sbe_volatile_total"] = [0, 0, 4_000_000, 8_000_000]
    assert all_samples(run_import(tmp_path, samples=frame))["ecc_sbe_volatile_total"].tolist() == [0, 0, 4e6, 8e6]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 3), st.sampled_from([0, 1, 5, 900, 2000, 10**9, None])), max_size=30
    )
)
def test_impossible_rises_equal_walking_along_each_counter(rows: list[tuple[int, int, int | None]]) -> None:
    rows = sorted(rows, key=lambda row: row[:1])
    unit = np.array([row[0] for row in rows], np.int32)
    ms = np.cumsum([row[1] * 100_000 for row in rows]).astype(np.int64)
    valid = np.array([row[2] is not None for row in rows], bool)
    values = np.array([row[2] or 0 for row in rows], np.float64)
    last: dict[int, tuple[float, int]] = {}
    doubted: dict[int, list[int]] = {}
    expected, stale = [], []
    for code, time, is_valid, value in zip(unit.tolist(), ms.tolist(), valid, values.tolist(), strict=True):
        before = last.get(code)
        allowed = 0 if before is None else 5 * max((time - before[1]) / 1000, 60)
        has_fallen = before is not None and value < before[0]
        gap, since = 0 if before is None else time - before[1], doubted.setdefault(code, [])
        counts_anew = has_fallen and bool(since) and value > values[since[0]]
        refused = bool(is_valid) and before is not None and value - (0 if has_fallen else before[0]) > allowed
        refused &= not (counts_anew and gap > 3_600_000)
        stale.append(refused and has_fallen and gap <= 3_600_000)
        expected.append(refused)
        if refused:
            since.append(len(stale) - 1)
        elif is_valid:
            for row in since if counts_anew else ():
                expected[row], stale[row] = before is not None and values[row] >= before[0], False
            last[code], doubted[code] = (value, time), []
    found = impossible_rises(values, valid, unit, ms, 5.0)
    assert [marks.tolist() for marks in found] == [expected, stale, values.tolist()]


@pytest.mark.parametrize("word", ["[GPU is lost]", " [GPU is lost]", "GPU is lost"])
def test_samples_that_say_that_a_gpu_is_lost_are_a_failure_at_the_first_of_them(tmp_path: Path, word: str) -> None:
    frame = samples_frame(gpus=2, times=8).astype(object)
    columns = ["gpu_temp_c", "power_w", "ecc_sbe_volatile_total"]
    of_first = frame["gpu"] == gpu(0)
    frame.loc[of_first & (frame.groupby("gpu").cumcount() >= 5), columns] = word
    result = run_import(tmp_path, samples=frame, inventory=inventory_frame())
    events = result.dataset.events()
    assert events[["type", "code", "gpu", "node"]].to_numpy().tolist() == [
        ["failure", "fallen_off_the_bus", gpu(0), "node-0"]
    ]
    assert events["timestamp"][0] == pd.Timestamp(frame["timestamp"][5])
    assert all_samples(result).query("gpu == @gpu(0)")["power_w"].notna().sum() == 5


def test_a_gpu_that_comes_back_and_is_lost_again_is_two_failures(tmp_path: Path) -> None:
    frame = samples_frame(gpus=1, times=20).astype(object)
    frame.loc[[5, 6, 15, 16, 17], "power_w"] = "[GPU is lost]"
    result = run_import(tmp_path, samples=frame)
    assert result.dataset.events()["timestamp"].tolist() == [pd.Timestamp(frame["timestamp"][n]) for n in (5, 15)]
