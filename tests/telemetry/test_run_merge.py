"""Adding to a dataset that is cut into runs: the same samples and events as in one run, and old runs left alone."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import telemetry.dataset.layout
from telemetry.dataset.files import FolderFiles
from telemetry.dataset.layout import Runs
from telemetry.importing.ingest import ImportResult
from tests.telemetry.helpers import DAY, STEP, all_samples, events_frame, gpu, inventory_frame, run_import

COUNTER = "ecc_sbe_volatile_total"
CHANNELS = ("gpu_temp_c", COUNTER, "energy_mj", "xid_last")
MIDNIGHTS = 5


@contextmanager
def runs_of(days: int | None) -> Iterator[None]:
    """Let datasets that are made be cut into runs of a day, or not at all."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(telemetry.dataset.layout, "RUN_ROWS", 1e-9 if days else float("inf"))
        yield


def frame_of(rows: list[tuple[pd.Timestamp, int, dict[str, float | None]]]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "timestamp": [when.isoformat() for when, *_ in rows],
            "node": [f"node-{number // 2}" for _, number, _ in rows],
            "gpu": [gpu(number) for _, number, _ in rows],
            **{name: [given.get(name) for *_, given in rows] for name in CHANNELS},
        }
    )


def import_all(folder: Path, pieces: list[pd.DataFrame], keep: list[datetime | None] | None = None) -> ImportResult:
    folder.mkdir()
    result = None
    for number, piece in enumerate(pieces):
        keep_from = None if keep is None else keep[number]
        result = run_import(folder, samples=piece, inventory=inventory_frame(), keep_from=keep_from, max_loss=1.0)
    return result


def events_of(result: ImportResult) -> list[tuple[object, ...]]:
    events = result.dataset.events()
    return sorted(zip(events["timestamp"], events["gpu"].astype(str), events["code"].astype(str), strict=True))


def assert_same(cut: ImportResult, one: ImportResult) -> None:
    assert (cut.dataset.meta.run_days, one.dataset.meta.run_days) == (1, None)
    assert cut.dataset.meta.counts["samples_by_bucket"] == one.dataset.meta.counts["samples_by_bucket"]
    if one.dataset.meta.counts["samples"]:
        pd.testing.assert_frame_equal(all_samples(cut), all_samples(one))
    assert events_of(cut) == events_of(one)
    assert cut.dataset.meta.span == one.dataset.meta.span
    assert cut.dataset.meta.quarantine == one.dataset.meta.quarantine
    assert cut.counts == one.counts


value = st.sampled_from([0.0, 1.0, 2.0, 5.0, 9.0])
given_channels = st.fixed_dictionaries(
    {}, optional={"gpu_temp_c": value, COUNTER: value, "energy_mj": value, "xid_last": st.sampled_from([0, 31, 79])}
)
# Instants near midnights, where runs meet; every two minutes (rolled up, where a unit has several) or every ten.
instants = st.builds(
    lambda day, place, fine: DAY + pd.Timedelta(days=day) + pd.Timedelta(minutes=place * (2 if fine else 10)),
    st.integers(0, MIDNIGHTS),
    st.integers(-6, 6),
    st.booleans(),
)
rows = st.lists(st.tuples(instants, st.integers(0, 3), given_channels), min_size=1, max_size=25)
pieces = st.lists(rows, min_size=2, max_size=5)
# Without shrinking: each example is a dozen imports.
MANY = settings(
    max_examples=6, phases=[Phase.reuse, Phase.generate], deadline=None, suppress_health_check=list(HealthCheck)
)


@MANY
@given(pieces=pieces, limits=st.just([None] * 5) | st.lists(st.integers(-1, MIDNIGHTS), min_size=5, max_size=5))
def test_in_whatever_order_samples_come_and_go_a_dataset_in_runs_says_what_one_run_would(pieces, limits):
    frames = [frame_of(piece) for piece in pieces]
    keep = [None if day is None else (DAY + pd.Timedelta(days=day)).to_pydatetime() for day in limits]
    keep[0] = None  # a first compaction of which nothing is kept makes no dataset
    with tempfile.TemporaryDirectory() as name:
        with runs_of(1):
            cut = import_all(Path(name) / "cut", frames, keep)
        with runs_of(None):
            one = import_all(Path(name) / "one", frames, keep)
        assert_same(cut, one)


def steady(hours: range, gpus: int = 4) -> pd.DataFrame:
    times = [DAY + pd.Timedelta(minutes=10 * turn) for turn in range(6 * hours.start, 6 * hours.stop)]
    return frame_of(
        [
            (when, number, {"gpu_temp_c": 40.0 + number, COUNTER: float((when - DAY) / STEP), "xid_last": 0})
            for number in range(gpus)
            for when in times
        ]
    )


def test_growing_compaction_by_compaction_and_importing_at_once_make_the_same_files(tmp_path: Path):
    with runs_of(1):
        at_once = import_all(tmp_path / "at_once", [steady(range(72))])
        grown = import_all(tmp_path / "grown", [steady(range(begin, begin + 9)) for begin in range(0, 72, 9)])
    assert grown.dataset.meta.files == at_once.dataset.meta.files
    assert grown.dataset.digest == at_once.dataset.digest
    bucket = grown.dataset.buckets()[0]
    assert [file.path[-21:] for file in grown.dataset.sample_files() if file.bucket == bucket] == [
        "part-20260301.parquet",
        "part-20260302.parquet",
        "part-20260303.parquet",
    ]


def test_a_compaction_rewrites_the_runs_that_get_rows_and_no_others(tmp_path: Path):
    with runs_of(1):
        before = import_all(tmp_path / "d", [steady(range(60))]).dataset
    inodes = {path.relative_to(before.path): path.stat().st_ino for path in before.path.rglob("part-*")}
    hashed = before.meta.files
    after = run_import(tmp_path / "d", samples=steady(range(60, 62))).dataset
    assert after.meta.run_days == 1  # as the dataset has it, whatever this compaction's rate would say
    changed = {path.name for path in after.path.rglob("part-*") if path.stat().st_ino not in inodes.values()}
    assert changed == {"part-20260303.parquet"}
    assert {name for name in hashed if "part-" in name and after.meta.files[name] != hashed[name]} == {
        name for name in hashed if name.endswith("part-20260303.parquet")
    }


def test_a_late_sample_at_the_end_of_a_run_corrects_the_first_rise_of_the_next(tmp_path: Path):
    def raw(minute: int, counter: float) -> pd.DataFrame:
        at = [DAY + pd.Timedelta(minutes=minute, seconds=seconds) for seconds in (-90, -60, -30, 0)]
        return frame_of([(when, 0, {COUNTER: counter}) for when in at])

    day = 24 * 60
    with runs_of(1):
        folder = tmp_path / "d"
        before = import_all(folder, [raw(day - 60, 0), raw(day + 30, 100), raw(2 * day + 30, 100)]).dataset
        after = run_import(folder, samples=raw(day - 10, 40))
    rises = all_samples(after).set_index("timestamp")[COUNTER + "_rise"]
    assert rises[DAY + pd.Timedelta(minutes=day - 10)] == 40
    assert rises[DAY + pd.Timedelta(minutes=day + 30)] == 60
    same = {file.path: file.sha256 for file in before.sample_files()}
    changed = [file.path for file in after.dataset.sample_files() if same[file.path] != file.sha256]
    assert [path[-16:] for path in changed] == ["20260301.parquet", "20260302.parquet"]


@pytest.mark.parametrize("minutes", [(2, 10), (10, 2), (-2, 0)])
@pytest.mark.parametrize("days", [1, None])
def test_stored_samples_of_one_step_become_one_when_their_unit_becomes_finer(tmp_path, minutes, days):
    first, second = ([(DAY + pd.Timedelta(days=1, minutes=minute), 0, {"energy_mj": 1.0})] for minute in minutes)
    finer = [(DAY + pd.Timedelta(days=3, minutes=minute), 0, {"energy_mj": 2.0}) for minute in (2, 4, 6)]
    with runs_of(days):
        result = import_all(tmp_path / "d", [frame_of(first), frame_of(second), frame_of(finer)])
    end = DAY + pd.Timedelta(days=1, minutes=max(minutes))
    assert all_samples(result)["timestamp"].tolist() == [end, DAY + pd.Timedelta(days=3, minutes=10)]
    assert result.counts["samples_rolled_up"] == 3


def test_an_unfinished_step_that_ends_where_retention_begins_is_kept(tmp_path: Path):
    """Its newest raw sample is older; in one run as in runs of a day."""
    begins = DAY + pd.Timedelta(days=2)
    raw = [(begins - pd.Timedelta(minutes=minutes), 1, {"gpu_temp_c": 40.0}) for minutes in (12, 6)]
    late = [(DAY + pd.Timedelta(days=4), 2, {"gpu_temp_c": 50.0})]
    for days in (1, None):
        with runs_of(days):
            name = f"{days}"
            kept = [None, begins.to_pydatetime()]
            samples = all_samples(import_all(tmp_path / name, [frame_of(raw), frame_of(late)], kept))
        assert samples["timestamp"].tolist() == [begins, late[0][0]]


def test_old_runs_go_without_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with runs_of(1):
        before = import_all(tmp_path / "d", [steady(range(96))]).dataset
    opens = FolderFiles.opened
    opened = set()

    def noted(files: FolderFiles, name: str) -> object:
        opened.add(name.rpartition("/")[2])
        return opens(files, name)

    monkeypatch.setattr(FolderFiles, "opened", noted)
    keep_from = (DAY + pd.Timedelta(days=2)).to_pydatetime()
    result = run_import(tmp_path / "d", samples=steady(range(96, 97)), keep_from=keep_from)
    assert "part-20260304.parquet" in opened
    assert not opened & {"part-20260301.parquet", "part-20260302.parquet"}
    assert result.counts["samples_past_retention"] == 4 * 2 * 144
    bucket = before.buckets()[0]
    assert result.dataset.runs_of(bucket) == [*before.runs_of(bucket)[2:], before.runs_of(bucket)[-1] + 1]
    border = (DAY + pd.Timedelta(days=3, hours=5)).to_pydatetime()
    cut = run_import(tmp_path / "d", samples=steady(range(97, 98)), keep_from=border)
    assert all_samples(cut)["timestamp"].min() == pd.Timestamp(border)


def test_events_alone_decide_nothing(tmp_path: Path):
    with runs_of(1):
        first = run_import(tmp_path, events=events_frame([("10:00", gpu(0), "xid", "79")])).dataset
        assert first.meta.runs == Runs(None)
        more = run_import(tmp_path, samples=steady(range(48))).dataset
    assert (more.meta.run_days, more.meta.counts["samples"]) == (1, 4 * 6 * 48)


def test_new_channels_rewrite_every_run(tmp_path: Path):
    with runs_of(1):
        run_import(tmp_path, samples=steady(range(48)).drop(columns=["energy_mj"]))
        whole = steady(range(48, 49))
        whole["energy_mj"] = 5.0
        dataset = run_import(tmp_path, samples=whole).dataset
    assert dataset.read_bucket(dataset.buckets()[0], ["energy_mj"]).num_rows > 0
    assert timedelta(days=1) * len(dataset.runs_of(dataset.buckets()[0])) == timedelta(days=3)
