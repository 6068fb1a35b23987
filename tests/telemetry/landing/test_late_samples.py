"""Samples that land after later ones were folded: rises and XIDs are those of one import."""

import tempfile
from pathlib import Path
from random import Random

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from telemetry.dataset.store import Dataset
from tests.telemetry.helpers import DAY, gpu
from tests.telemetry.landing.test_compaction import fold, land, samples_of

COUNTER = "ecc_sbe_volatile_total"
XIDS = (31, 79, 48, 94, 63, 74)
FEW = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))


def watched(minute: int, **channels: object) -> pd.DataFrame:
    times = pd.date_range(DAY + pd.Timedelta(minutes=minute), periods=4, freq="30s")
    return pd.DataFrame({"timestamp": times, "node": "node-0", "gpu": gpu(0), "gpu_temp_c": 50.0, **channels})


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
            land(Path(folder), piece)
            fold(Path(folder))
        risen = samples_of(Path(folder))[COUNTER + "_rise"].sum()
    # The first and the last sample are never set aside, whatever came before them.
    assert risen == pytest.approx(frame[COUNTER].iloc[-1] - frame[COUNTER].iloc[0], rel=1e-5)


def test_a_step_goes_on_after_a_sample_that_was_stored_before_its_unit_was_rolled_up(tmp_path: Path) -> None:
    first, between, alone, after = parts(rising([0] * 37 + [396, 0, 0]), [1, 36, 37])
    for piece in (first, alone, between, after):
        land(tmp_path, piece)
        fold(tmp_path)
    assert samples_of(tmp_path)[COUNTER + "_rise"].sum() == 396


@FEW
@given(given_pieces=pieces, first=st.sampled_from([0, None]), changes=st.sets(st.integers(1, 6)))
def test_in_whatever_order_whole_steps_land_each_xid_is_reported_once(
    given_pieces: Pieces, first: int | None, changes: set[int]
) -> None:
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
            land(Path(folder), piece)
            fold(Path(folder))
        assert xids(Path(folder)) == sorted(str(xid) for xid in at.values())
