"""What goes wrong around a compaction: wrong clocks, lagging sources, unknown GPUs, damaged files."""

import tempfile
from datetime import timedelta
from pathlib import Path
from random import Random

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foundation.errors import InputError
from telemetry.dataset.store import Dataset
from telemetry.staging.inventory import distinguish, merge_observations, no_runs
from tests.telemetry.helpers import DAY, gpu, inventory_frame, run_import, samples_frame, write_csv
from tests.telemetry.staging_world import (
    NOW,
    compacted,
    event,
    raw,
    samples_of,
    stage_events,
    stage_frame,
    stage_rows,
    staging,
    state_of,
)


def test_what_an_import_adds_between_two_compactions_keeps_its_place(tmp_path: Path):
    stage_frame(tmp_path, raw(gpus=1))
    compacted(tmp_path)
    foreign = samples_frame(gpus=1, times=6).assign(gpu=gpu(9), gpu_temp_c=90.0)
    run_import(tmp_path, samples=foreign, inventory=inventory_frame(1).assign(gpu=gpu(9)))
    stage_frame(tmp_path, raw(gpus=1, start=DAY + pd.Timedelta("1h")))
    compacted(tmp_path)
    samples = samples_of(tmp_path)
    assert set(Dataset.open(tmp_path / "dataset").inventory()["gpu"]) == {gpu(0), gpu(9)}
    assert (samples.loc[samples["gpu"] == gpu(9), "gpu_temp_c"] == 90).all()
    assert (samples.loc[samples["gpu"] == gpu(0), "gpu_temp_c"] < 60).all()


def test_lost_sightings_do_not_lose_a_silent_gpu(tmp_path: Path):
    stage_frame(tmp_path, raw(gpus=2))
    compacted(tmp_path)
    before = samples_of(tmp_path)
    state_of(tmp_path, "sightings").unlink()
    stage_frame(tmp_path, raw(gpus=2, start=DAY + pd.Timedelta("1h")).query(f"gpu == '{gpu(1)}'"))
    compacted(tmp_path)
    after = samples_of(tmp_path)
    assert Dataset.open(tmp_path / "dataset").inventory()["removed_at"].isna().all()
    pd.testing.assert_frame_equal(after[after["gpu"] == gpu(0)], before[before["gpu"] == gpu(0)])


def test_an_inventory_alone_is_compacted_and_a_corrected_one_replaces_it(tmp_path: Path):
    stage_frame(tmp_path, raw(gpus=2))
    compacted(tmp_path)
    for day in ("2026-02-01", "2026-02-03"):
        hosts = inventory_frame(2).assign(installed_at=f"{day}T00:00:00Z", rack="r1")
        compacted(tmp_path, inventory=write_csv(tmp_path / "hosts.csv", hosts))
        installations = Dataset.open(tmp_path / "dataset").inventory()
        assert installations["installed_at"].tolist() == [pd.Timestamp(day, tz="UTC")] * 2
        assert installations["rack"].tolist() == ["r1", "r1"]


def test_an_inventory_with_a_gpu_in_two_places_costs_nothing_else(tmp_path: Path):
    stage_frame(tmp_path, raw(gpus=2))
    twice = pd.concat([inventory_frame(1).assign(node="node-7"), inventory_frame(2)])
    result = compacted(tmp_path, inventory=write_csv(tmp_path / "hosts.csv", twice))
    assert result.compacted == {"samples": 1}
    assert result.quarantined["in two places from the same time"] == 1


def test_an_event_whose_gpu_never_comes_is_quarantined_in_the_end(tmp_path: Path):
    stage_frame(tmp_path, raw(gpus=1))
    stage_events(tmp_path, [event(DAY, "79", gpu="GPU-never")])
    for days, expected in ((0, {}), (29, {}), (31, {"unknown gpu": 1}), (32, {})):
        stage_frame(tmp_path, raw(gpus=1, start=DAY + pd.Timedelta(days=days)))
        assert compacted(tmp_path, now=NOW + timedelta(days=days)).quarantined == expected


def test_rows_of_steps_that_are_not_over_wait_and_lagging_sources_join_them(tmp_path: Path):
    now = (DAY + pd.Timedelta("1h")).to_pydatetime()
    temperatures = raw(gpus=1, times=120)[["timestamp", "node", "gpu", "gpu_temp_c"]]
    powers = raw(gpus=1, times=120)[["timestamp", "node", "gpu", "power_w"]]
    stage_frame(tmp_path, temperatures)
    lagging = powers["timestamp"] <= DAY + pd.Timedelta("45min")
    stage_frame(tmp_path, powers[lagging])
    first = compacted(tmp_path, now=now)
    assert "their steps to be over: 49 rows later than 2026-03-01T00:40:00.000Z" in first.waits_for
    assert samples_of(tmp_path)["timestamp"].max() == DAY + pd.Timedelta("40min")
    stage_frame(tmp_path, powers[~lagging])
    second = compacted(tmp_path, now=now + timedelta(hours=1))
    assert second.quarantined == {}
    samples = samples_of(tmp_path)
    assert samples["sample_count"].sum() == 120
    assert samples[["gpu_temp_c", "power_w"]].notna().all(axis=None)
    assert staging(tmp_path).waiting() == []


def test_clocks_that_cannot_be_right_move_nothing(tmp_path: Path):
    stage_frame(tmp_path, raw(gpus=2))
    for wrong in ("2040-01-01", "2001-01-01"):
        stage_frame(tmp_path, raw(gpus=2, times=3, start=pd.Timestamp(wrong, tz="UTC")))
    for wrong in ("2041-01-01", "2006-03-01", "1970-01-01"):
        stage_events(tmp_path, [event(pd.Timestamp(wrong, tz="UTC"), "79", gpu=gpu(0))])
    result = compacted(tmp_path)
    assert result.quarantined == {
        "an impossible clock": 14,
        "timestamp out of range": 1,
    }
    dataset = Dataset.open(tmp_path / "dataset")
    assert dataset.events().empty
    assert dataset.meta.span[0] == DAY.to_pydatetime()
    assert dataset.meta.span[1] < DAY.to_pydatetime() + timedelta(hours=1)
    assert (dataset.inventory()["installed_at"] == DAY).all()


def test_an_inventory_waits_for_the_first_usable_sample_row(tmp_path: Path):
    hosts = write_csv(tmp_path / "hosts.csv", inventory_frame(1))
    stage_frame(tmp_path, raw(gpus=1, times=3, start=pd.Timestamp("2001-01-01", tz="UTC")))
    with pytest.raises(InputError, match="no sample row can be used"):
        compacted(tmp_path, inventory=hosts)
    stage_frame(tmp_path, raw(gpus=1))
    assert compacted(tmp_path).compacted == {"samples": 2}


def test_a_node_that_joins_later_was_not_there_before(tmp_path: Path):
    joined = DAY + pd.Timedelta(days=20)
    stage_frame(tmp_path, raw(gpus=1))
    stage_frame(tmp_path, raw(gpus=1, start=DAY + pd.Timedelta("50min")).assign(gpu=gpu(5), node="node-5"))
    compacted(tmp_path)
    stage_frame(tmp_path, raw(gpus=1, start=joined).assign(gpu=gpu(8), node="node-8"))
    stage_frame(tmp_path, raw(gpus=1, start=joined).assign(gpu=gpu(9), node="node-9"))
    cordoned = joined - pd.Timedelta("2h")
    stage_events(tmp_path, [event(cordoned, "cordon", node="node-9") | {"type": "drain"}])
    assert compacted(tmp_path).quarantined == {}
    for more in (joined + pd.Timedelta("2h"), joined - pd.Timedelta("5h")):
        installations = Dataset.open(tmp_path / "dataset").inventory()
        starts = dict(zip(installations["node"], installations["installed_at"], strict=True))
        assert starts == {"node-0": DAY, "node-5": DAY, "node-8": joined, "node-9": cordoned}
        stage_frame(tmp_path, raw(gpus=1, start=more).assign(gpu=gpu(8), node="node-8"))
        assert compacted(tmp_path).quarantined == {}
    installations = Dataset.open(tmp_path / "dataset").inventory()
    assert installations.loc[installations["node"] == "node-8", "installed_at"].tolist() == [
        joined - pd.Timedelta("5h")
    ]


def put(folder: Path, number: int, when: pd.Timestamp, address: str = "0000:3b:00.0") -> None:
    """See a GPU at an address of node-0, with samples from then on."""
    stage_frame(folder, raw(gpus=1, start=when).assign(gpu=gpu(number)))
    row = {"gpu": gpu(number), "node": "node-0", "pci_bus_id": address, "seen_at": when.to_pydatetime()}
    stage_rows(folder, "inventory", row)


def ends(folder: Path) -> list[pd.Timestamp | None]:
    """Return when each GPU was removed from its last place; None if it is still there."""
    installations = Dataset.open(folder / "dataset").inventory().sort_values(["gpu", "installed_at"])
    return [None if pd.isna(when) else when for when in installations.groupby("gpu")["removed_at"].nth(-1)]


@pytest.mark.parametrize("runs", [1, 3])
def test_a_gpu_that_is_put_back_ends_the_installation_in_its_place(runs: int, tmp_path: Path):
    first, back = DAY + pd.Timedelta(days=1), DAY + pd.Timedelta(days=2)
    for number, when in ((0, DAY), (1, first), (0, back)):
        put(tmp_path, number, when)
        if runs == 3:
            compacted(tmp_path)
    compacted(tmp_path)
    ended = back + pd.Timedelta("29min30s")
    assert ends(tmp_path) == [None, ended]
    # It stays where it is, however long the other goes on, and wherever in its node it goes.
    put(tmp_path, 0, DAY + pd.Timedelta(days=3))
    compacted(tmp_path)
    assert ends(tmp_path) == [None, ended]
    put(tmp_path, 0, DAY + pd.Timedelta(days=4), "0000:86:00.0")
    compacted(tmp_path)
    assert ends(tmp_path) == [None, ended]
    put(tmp_path, 1, DAY + pd.Timedelta(days=5))
    assert compacted(tmp_path).quarantined == {}
    assert ends(tmp_path) == [None, None]


def test_an_end_that_the_operator_takes_back_is_none(tmp_path: Path):
    stage_frame(tmp_path, raw(gpus=1))
    for end in ("2026-04-01T00:00:00Z", None):
        hosts = inventory_frame(1).assign(removed_at=end)
        compacted(tmp_path, inventory=write_csv(tmp_path / "hosts.csv", hosts))
        assert ends(tmp_path) == [None if end is None else pd.Timestamp(end)]


def test_two_gpus_exchanged_again_and_again_are_never_both_in_the_slot(tmp_path: Path):
    for day in range(6):
        put(tmp_path, day % 2, DAY + pd.Timedelta(days=day))
        assert compacted(tmp_path).quarantined == {}
        assert sum(end is None for end in ends(tmp_path)) == 1
        assert ends(tmp_path)[day % 2] is None


def test_a_silent_gpu_whose_address_a_neighbour_gets_is_still_there(tmp_path: Path):
    for number, address in ((0, "0000:3b:00.0"), (1, "0000:86:00.0")):
        put(tmp_path, number, DAY + pd.Timedelta(minutes=number), address)
    compacted(tmp_path)
    put(tmp_path, 0, DAY + pd.Timedelta(days=1), "0000:86:00.0")
    compacted(tmp_path)
    assert ends(tmp_path) == [None, None]


def test_a_watched_node_alone_does_not_decide_what_a_fleet_is_of(tmp_path: Path):
    seen = {"node": "node-0", "rack": "r", "seen_at": DAY.to_pydatetime()}
    stage_rows(tmp_path, "inventory", seen)
    stage_events(tmp_path, [event(DAY, "cordon") | {"type": "drain"}])
    assert "no GPU was seen yet" in compacted(tmp_path).waits_for
    stage_frame(tmp_path, raw(gpus=1))
    compacted(tmp_path)
    assert Dataset.open(tmp_path / "dataset").meta.unit == "gpu"


def test_an_empty_name_is_no_gpu(tmp_path: Path):
    stage_frame(tmp_path, raw(gpus=1))
    stage_frame(tmp_path, raw(gpus=1).assign(gpu=""))
    assert compacted(tmp_path).quarantined == {"missing gpu": 60}


def test_a_gpu_listed_under_two_node_names_is_kept_in_one_place(tmp_path: Path):
    frame = raw(gpus=1, times=400)
    frame.loc[1::2, "node"] = "node-0.example.com"
    stage_frame(tmp_path, frame)
    compacted(tmp_path)
    assert len(Dataset.open(tmp_path / "dataset").inventory()) == 1


@pytest.mark.parametrize("pieces", [1, 4])
def test_a_pushed_identity_on_two_nodes_is_two_gpus(pieces: int, tmp_path: Path):
    own = raw(gpus=2, times=60, every="10min")
    twin = own[own["gpu"] == gpu(0)].assign(node="node-9")
    frame = pd.concat([own, twin.assign(gpu_temp_c=twin["gpu_temp_c"] + 30)])
    piece = frame["timestamp"].rank(method="dense").astype(int) * pieces // 61
    for number in range(pieces):
        stage_frame(tmp_path, frame[piece == number])
        compacted(tmp_path)
    samples = samples_of(tmp_path)
    assert samples.groupby("gpu")["node"].unique().map(list).to_dict() == {
        gpu(1): ["node-0"], f"node-0@{gpu(0)}": ["node-0"], f"node-9@{gpu(0)}": ["node-9"]
    }  # fmt: skip
    inventory = Dataset.open(tmp_path / "dataset").inventory()
    assert inventory["removed_at"].isna().groupby(inventory["gpu"]).sum().eq(1).all()


def test_a_gpu_that_single_samples_show_on_two_nodes_in_turn_is_named_by_its_node():
    runs = no_runs()
    for turn in range(24):
        seen = {"gpu": ["twin", "own"], "node": [f"node-{turn % 2}", "node-0"]}
        ms = 300_000 * turn
        runs = merge_observations(runs, pd.DataFrame(seen).assign(first_ms=ms, last_ms=ms))
    left, names = distinguish(runs, timedelta(minutes=10))
    assert left["gpu"].tolist() == ["own", "twin", "twin"], "not a row for each sample"
    assert names == {("twin", f"node-{number}"): f"node-{number}@twin" for number in (0, 1)}


COUNTER = "ecc_sbe_volatile_total"
XIDS = (31, 79, 48, 94, 63, 74)
FEW = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))


def xids(folder: Path) -> list[str]:
    events = Dataset.open(folder / "dataset").events()
    return sorted(events.loc[events["source"] == "xid_gauge", "code"])


Pieces = tuple[list[int], set[int], Random]
pieces = st.tuples(
    st.lists(st.integers(0, 5000), min_size=40, max_size=40),
    st.sets(st.integers(1, 39), max_size=4),
    st.randoms(use_true_random=False),
)


def parts(frame: pd.DataFrame, cuts: list[int]) -> list[pd.DataFrame]:
    return [frame.iloc[start:end] for start, end in zip([0, *cuts], [*cuts, len(frame)], strict=True)]


def rising(steps: list[int]) -> pd.DataFrame:
    times = pd.date_range(DAY, periods=len(steps), freq="2min")
    return pd.DataFrame(
        {"timestamp": times, "node": "node-0", "gpu": gpu(0), COUNTER: pd.Series(steps).cumsum().astype(float)}
    )


@FEW
@given(given_pieces=pieces)
def test_in_whatever_order_pieces_land_the_rises_add_up_to_the_truth(given_pieces: Pieces) -> None:
    steps, cuts, turn = given_pieces
    frame = rising(steps)
    order = parts(frame, sorted(cuts))
    turn.shuffle(order)
    with tempfile.TemporaryDirectory() as folder:
        for piece in order:
            stage_frame(Path(folder), piece)
            compacted(Path(folder))
        risen = samples_of(Path(folder))[COUNTER + "_rise"].sum()
    # The first and the last sample are never set aside, whatever came before them.
    assert risen == pytest.approx(frame[COUNTER].iloc[-1] - frame[COUNTER].iloc[0], rel=1e-5)


def test_a_step_goes_on_after_a_sample_that_was_stored_before_its_unit_was_rolled_up(tmp_path: Path) -> None:
    first, between, alone, after = parts(rising([0] * 37 + [396, 0, 0]), [1, 36, 37])
    for piece in (first, alone, between, after):
        stage_frame(tmp_path, piece)
        compacted(tmp_path)
    assert samples_of(tmp_path)[COUNTER + "_rise"].sum() == 396


@FEW
@given(given_pieces=pieces, first=st.sampled_from([0, None]), changes=st.sets(st.integers(1, 6)))
def test_in_whatever_order_whole_steps_land_each_xid_is_reported_once(given_pieces, first, changes):
    steps, cuts, turn = given_pieces
    frame = rising(steps)
    # One change a step of 10 minutes, at any of its five samples.
    at = {1 + 5 * step + steps[step] % 5: xid for step, xid in zip(sorted(changes), XIDS, strict=False)}
    frame["xid_last"] = pd.Series([at.get(row) for row in range(len(frame))], dtype="Int32").ffill()
    frame["xid_last"] = frame["xid_last"] if first is None else frame["xid_last"].fillna(first)
    order = parts(frame, sorted({1 + 5 * (cut // 5) for cut in cuts}))
    # What comes before a GPU's first rows cannot take back what they told, so the first piece is first.
    late = order[1:]
    turn.shuffle(late)
    with tempfile.TemporaryDirectory() as folder:
        for piece in [order[0], *late]:
            stage_frame(Path(folder), piece)
            compacted(Path(folder))
        assert xids(Path(folder)) == sorted(str(xid) for xid in at.values())
