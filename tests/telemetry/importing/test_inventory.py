from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from telemetry.importing.inventory import InstallationIndex
from tests.telemetry.helpers import events_frame, gpu, inventory_frame, quarantine_of, run_import, samples_frame

ONE = events_frame([("01:00", gpu(0), "xid", "79")])


def test_a_stay_ends_where_the_next_one_begins(tmp_path: Path):
    inventory = inventory_frame(1)
    inventory.loc[1] = {**inventory.loc[0], "node": "node-5", "installed_at": "2026-02-01T00:00:00Z"}
    result = run_import(tmp_path, events=ONE.assign(node="node-5"), inventory=inventory, out="overlapping")
    assert (result.counts["overlapping_installations_ended"], result.quarantined) == (1, {})
    assert result.dataset.inventory()["removed_at"].tolist() == [pd.Timestamp("2026-02-01", tz="UTC"), pd.NaT]
    inventory["removed_at"] = ["2026-02-01T00:00:00Z", None]
    samples = samples_frame(1).assign(node="node-5")
    assert len(run_import(tmp_path, samples=samples, inventory=inventory).dataset.inventory()) == 2


def test_of_stays_that_begin_at_the_same_time_the_last_one_is_kept(tmp_path: Path):
    inventory = pd.concat([inventory_frame(4), inventory_frame(1).assign(node="node-1")], ignore_index=True)
    result = run_import(tmp_path, events=ONE.assign(node="node-1"), inventory=inventory)
    assert result.quarantined == {"in two places from the same time": 1}
    assert result.dataset.inventory().set_index("gpu")["node"][gpu(0)] == "node-1"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"node": None}, "missing node"),
        ({"gpu": None}, "missing gpu"),
        ({"removed_at": "2025-12-01T00:00:00Z"}, "removed before installed"),
        ({"installed_at": "some day"}, "unreadable timestamp in installed_at"),
        ({"installed_at": "2026-01-01T00:00:00"}, "naive timestamp in installed_at"),
    ],
)
def test_a_stay_that_cannot_be_used_is_set_aside(values: dict[str, object], reason: str, tmp_path: Path):
    inventory = inventory_frame().assign(removed_at=None).astype(object)
    for name, value in values.items():
        inventory.loc[3, name] = value
    result = run_import(tmp_path, events=ONE, inventory=inventory)
    assert result.quarantined == {reason: 1}
    assert len(result.dataset.inventory()) == 3
    assert quarantine_of(result).iloc[0]["table"] == "inventory"


@pytest.mark.parametrize(
    ("frame", "texts"),
    [
        (inventory_frame().drop(columns="node"), "missing column 'node'"),
        (inventory_frame()[:0], "the inventory has no usable rows"),
        (inventory_frame().assign(installed_at="2026-01-01T00:00:00"), "timestamps are naive"),
    ],
)
def test_inventories_that_cannot_be_used(frame: pd.DataFrame, texts: str, tmp_path: Path):
    with pytest.raises(InputError) as caught:
        run_import(tmp_path, events=ONE, inventory=frame)
    assert texts in str(caught.value)


def test_further_columns_stay_and_a_missing_start_is_before_everything(tmp_path: Path):
    inventory = inventory_frame().assign(psu="x1", weight_kg=1.5, installed_at=None)
    result = run_import(tmp_path, samples=samples_frame(), inventory=inventory)
    installations = result.dataset.inventory()
    assert installations["psu"].tolist() == ["x1"] * 4
    assert installations["weight_kg"].tolist() == [1.5] * 4
    assert (installations["installed_at"] == pd.Timestamp("2026-03-01T00:00Z")).all()
    assert result.counts["installed_before_anything_observed"] == 4


installation_rows = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 4)), max_size=12)


@given(installations=installation_rows, asked=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), max_size=20))
def test_looking_up_equals_searching_every_stay(installations, asked):
    rows, free = [], {}
    for unit, gap, length in installations:
        start = free.get(unit, 0) + gap
        rows.append((f"g{unit}", f"n{len(rows)}", start, start + length))
        free[unit] = start + length
    frame = pd.DataFrame(rows, columns=["gpu", "node", "from", "to"])
    for name, source in (("installed_at", "from"), ("removed_at", "to")):
        frame[name] = pd.to_datetime(frame[source].astype("int64") * 1000, unit="ms", utc=True)
    lookup = InstallationIndex(frame, "gpu")
    names = [f"g{unit}" for unit, _ in asked]
    positions = lookup.find(lookup.codes(names), np.array([second * 1000 for _, second in asked], np.int64))
    for (unit, second), row in zip(asked, positions.tolist(), strict=True):
        mine = [installation for installation in rows if installation[0] == f"g{unit}"]
        begun = [installation for installation in mine if installation[2] <= second]
        expected = -1 if not mine else -2 if not begun else -3 if second > begun[-1][3] else begun[-1][1]
        assert (lookup.nodes[row] if row >= 0 else row) == expected
