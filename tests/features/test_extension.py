"""A longer dataset extends the matrix that stands; the result is the matrix built from scratch, byte for byte."""

import json
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from features.config import DecisionSection, FeatureSection
from features.matrix import build_tasks, parts
from features.matrix.matrix import FeatureMatrix
from foundation.errors import InputError
from telemetry.dataset.layout import Runs
from telemetry.dataset.store import Dataset
from telemetry.dataset.writer import DatasetWriter
from tests.features.small_fleet import (
    CHANNELS,
    HOUR,
    STEP,
    T0,
    Training,
    events_of,
    gpus,
    inventory_of,
    make_matrix,
    samples_of,
    to_table,
    xid,
)

FEATURES = FeatureSection(
    windows=(HOUR, 4 * HOUR), peer_window=2 * HOUR, onset=((HOUR, 6 * HOUR), (6 * HOUR, 24 * HOUR))
)
WHOLE = samples_of(inventory_of(gpus(8)), 96, seed=3)


@dataclass(frozen=True)
class State:
    """What a dataset holds at some time."""

    hours: float
    events: list[dict] = field(default_factory=list)
    inventory: list[dict] = field(default_factory=lambda: gpus(8))
    held_back: frozenset[int] = frozenset()  # positions of samples in WHOLE that have not come
    begins: float = 0.0


def write(path: Path, state: State, *, run_days: int | None = 1, buckets: int = 2) -> Dataset:
    end = T0 + state.hours * HOUR
    known = WHOLE["timestamp"].between(T0 + state.begins * HOUR, end) & ~WHOLE.index.isin(state.held_back)
    samples = WHOLE[known]
    with DatasetWriter(path, step=STEP, channels=CHANNELS, buckets=buckets, runs=Runs(run_days)) as writer:
        bucket = samples["node"].map(writer.bucket_of)
        for number in sorted(set(bucket)):
            writer.write_samples(number, to_table(samples[bucket == number]))
        return writer.finish(
            events=events_of(state.events).sort_values(["known_at", "timestamp", "node", "gpu", "code"]),
            inventory=inventory_of(state.inventory),
            span=(T0 + state.begins * HOUR, end),
        )


def build(dataset: Dataset, out: Path, **options) -> FeatureMatrix:
    return make_matrix(dataset, out, **{"features": FEATURES, "training": Training(3, 4), **options})


@dataclass
class Watched:
    """Rows that each build computed."""

    rows: list[int] = field(default_factory=list)


@pytest.fixture
def watched(monkeypatch) -> Watched:
    monkeypatch.setattr(parts, "PART_ROWS", 100)
    builds, begin = Watched(), build_tasks.Build.__init__

    def noted(self, *args) -> None:
        begin(self, *args)
        builds.rows.append(len(self.keys))

    monkeypatch.setattr(build_tasks.Build, "__init__", noted)
    return builds


def assert_extended(tmp_path: Path, before: State, after: State, *, run_days: int | None = 1, **options) -> None:
    """Extend the matrix of one state to the next, and hold it against the one that is built from scratch."""
    build(write(tmp_path / "before", before, run_days=run_days), tmp_path / "m", **options)
    longer = write(tmp_path / "after", after, run_days=run_days)
    build(longer, tmp_path / "m", **options)
    build(longer, tmp_path / "scratch", **options)
    names = sorted(path.name for path in (tmp_path / "scratch").iterdir())
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == names
    for name in names:
        assert (tmp_path / "m" / name).read_bytes() == (tmp_path / "scratch" / name).read_bytes(), name


def test_a_day_more_computes_a_day(tmp_path, watched):
    events = [xid(20, "gpu01", "node0"), xid(40.5, "gpu05", "node1")]
    before, after = State(71.9, events), State(96, events)
    build(write(tmp_path / "before", before), tmp_path / "m")
    inodes = {path.name: path.stat().st_ino for path in (tmp_path / "m").iterdir()}
    longer = write(tmp_path / "after", after)
    extended = build(longer, tmp_path / "m")
    assert watched.rows[1] == 9 * 8  # from 00:00 of the fourth day to 00:00 of the next
    before_midnight = [part.file for part in extended.meta.parts if part.file < f"part-{T0 + 72 * HOUR:%Y%m%d}"]
    same = [name for name in before_midnight if inodes[name] == (tmp_path / "m" / name).stat().st_ino]
    assert len(same) == 3  # the parts end at midnight, so every one that stood is the same file
    assert same == before_midnight
    scratch = build(longer, tmp_path / "scratch")
    assert watched.rows[2] == scratch.meta.counts["rows"]
    for path in (tmp_path / "scratch").iterdir():
        assert path.read_bytes() == (tmp_path / "m" / path.name).read_bytes(), path.name


FIRST = xid(20, "gpu01", "node0")
NEW_GPU = {**gpus(9)[8], "installed_at": T0 + 50 * HOUR, "node": "node1"}
LATE = frozenset(WHOLE.index[WHOLE["timestamp"].between(T0 + 30 * HOUR, T0 + 31 * HOUR)][:5])


@pytest.mark.parametrize(
    ("before", "after", "most"),
    [
        pytest.param(State(48, [FIRST]), State(72, [FIRST, xid(50, "gpu06", "node1")]), 0.5, id="an incident"),
        pytest.param(
            State(48, [FIRST]),
            State(60, [FIRST, xid(30, "gpu06", "node1", known_at=T0 + 49 * HOUR)]),
            0.99,
            id="a ticket entered a day late",
        ),
        pytest.param(State(48, [FIRST, xid(40, "gpu06", "node1")]), State(60, [FIRST]), 0.99, id="an event taken back"),
        pytest.param(State(60), State(48), 0.2, id="a shorter dataset"),
        pytest.param(State(60, held_back=LATE), State(60), 0.99, id="samples that come late"),
        pytest.param(State(48), State(72, inventory=[*gpus(8), NEW_GPU]), 0.5, id="a GPU joins"),
    ],
)
def test_only_rows_that_may_differ_are_computed(tmp_path, watched, before, after, most):
    assert_extended(tmp_path, before, after)
    assert watched.rows[1] <= most * watched.rows[2]


def test_where_all_time_is_one_run_days_are_distinguished_as_well(tmp_path, watched):
    assert_extended(tmp_path, State(71.9), State(80), run_days=None)
    assert watched.rows[1] < watched.rows[2] / 4


@pytest.mark.parametrize(
    ("change", "computed"),
    [
        pytest.param({"removed_at": T0 + 50 * HOUR}, 40, id="a GPU leaves"),
        pytest.param({"driver": "550.1"}, None, id="an attribute of a GPU changes"),
    ],
)
def test_the_inventory_is_compared_installation_by_installation(tmp_path, watched, change, computed):
    changed = gpus(8)
    changed[5] = {**changed[5], **change}
    assert_extended(tmp_path, State(60), State(60, inventory=changed))
    assert watched.rows[1] == watched.rows[2] if computed is None else watched.rows[1] <= computed


def test_what_cannot_be_extended_is_built_from_scratch(tmp_path, watched):
    build(write(tmp_path / "d", State(48)), tmp_path / "m")
    longer = write(tmp_path / "d", State(60))
    for options in (
        {"decision": DecisionSection(every=6 * HOUR)},
        {"features": FEATURES.model_copy(update={"windows": (HOUR,)})},
        {"training": Training(1, 4)},
    ):
        matrix = build(longer, tmp_path / "m", **options)
        assert watched.rows[-1] == matrix.meta.counts["rows"]
    matrix = build(write(tmp_path / "d", State(60, begins=6)), tmp_path / "m")
    assert watched.rows[-1] == matrix.meta.counts["rows"]


def test_a_new_driver_gets_the_next_code(tmp_path, watched):
    update = xid(50, "gpu01", "node0", type="driver", code="560")
    assert_extended(tmp_path, State(48), State(72, [update]))
    assert watched.rows[1] < watched.rows[2] / 2
    earlier = xid(20, "gpu01", "node0", type="driver", code="550")
    matrix = build(write(tmp_path / "d", State(72, [earlier, update])), tmp_path / "m")
    assert watched.rows[-1] == matrix.meta.counts["rows"]  # it moves the other's code


@pytest.mark.parametrize("damage", ["missing", "another schema"])
def test_a_record_that_cannot_be_used_is_no_error(tmp_path, watched, damage):
    build(write(tmp_path / "d", State(48)), tmp_path / "m")
    path = tmp_path / "m" / "built-from.json"
    if damage == "missing":
        path.unlink()
    else:
        path.write_text(json.dumps({"settings": 1}))
    matrix = build(write(tmp_path / "d", State(60)), tmp_path / "m")
    assert watched.rows[1] == matrix.meta.counts["rows"]


def test_a_file_without_digests_of_days_is_other_from_its_first_day_on(tmp_path, watched, monkeypatch):
    monkeypatch.setattr("telemetry.dataset.writer.footer", lambda table: {})
    assert_extended(tmp_path, State(71.9), State(80), run_days=2)
    assert watched.rows[1] < watched.rows[2]


def test_a_matrix_that_was_replaced_meanwhile_is_not_mixed_with_another(tmp_path, watched, monkeypatch):
    build(write(tmp_path / "d", State(48)), tmp_path / "m")
    longer = write(tmp_path / "d", State(60))
    begin = build_tasks.Build.__init__

    def replaced(self, order, *more) -> None:
        path = tmp_path / "m" / "matrix.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "digest": "another"}))
        begin(self, order, *more)

    monkeypatch.setattr(build_tasks.Build, "__init__", replaced)
    with pytest.raises(InputError, match="the matrix was replaced while it was extended"):
        build(longer, tmp_path / "m")


def test_without_links_parts_are_copied(tmp_path, watched, monkeypatch):
    def refuse(*args) -> None:
        raise OSError("no links here")

    monkeypatch.setattr("os.link", refuse)
    assert_extended(tmp_path, State(71.9), State(80))
    assert watched.rows[1] < watched.rows[2] / 4


instants = st.integers(0, 4 * 96).map(lambda quarter: quarter / 4)


@st.composite
def states(draw) -> tuple[State, State]:
    """Two states of a fleet, the later one longer and with more known."""
    events = [
        {
            **xid(draw(instants), *draw(st.sampled_from([("gpu01", "node0"), ("gpu06", "node1"), (None, "node0")]))),
            **draw(
                st.sampled_from(
                    [{"code": "79"}, {"code": "74"}, {"type": "drain", "code": ""}, {"type": "repair", "code": ""}]
                )
            ),
        }
        for _ in range(draw(st.integers(0, 6)))
    ]
    for event in events:
        event["known_at"] = event["timestamp"] + draw(st.sampled_from([10, 10, 300, 2000])) * timedelta(minutes=1)
    first, second = sorted((draw(st.integers(30, 90)), draw(st.integers(30, 90))))
    gone = draw(st.none() | instants)
    now = T0 + first * HOUR
    after = gpus(8)
    if gone is not None:
        after[6]["removed_at"] = T0 + gone * HOUR
        after.append({**gpus(9)[8], "installed_at": T0 + gone * HOUR, "node": "node1", "slot": "2"})
    before = [dict(row) for row in after if row["installed_at"] <= now]
    for row in before:
        row["removed_at"] = row["removed_at"] if _known(row.get("removed_at"), now) else None
    late = frozenset(draw(st.lists(st.sampled_from(WHOLE.index.tolist()), max_size=3)))
    known = [event for event in events if event["known_at"] <= now]
    return State(first, known, before, late), State(second, events, after)


def _known(instant: datetime | None, now: datetime) -> bool:
    return instant is not None and instant <= now


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(both=states(), run_days=st.sampled_from([1, 2, None]), augmentation=st.sampled_from([0, 3]))
def test_an_extended_matrix_is_the_one_built_from_scratch(tmp_path_factory, both, run_days, augmentation):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parts, "PART_ROWS", 100)
        folder = tmp_path_factory.mktemp("extended")
        assert_extended(folder, *both, run_days=run_days, training=Training(augmentation, 4))
