"""Other parameters: groups that nothing has changed for are taken over, and what comes out is the matrix built anew."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from features.config import GROUPS, FeatureSection, LabelSection
from features.matrix import build_tasks, building, slabs
from features.matrix.matrix import FeatureMatrix
from telemetry.dataset.store import Dataset
from tests.features.small_fleet import (
    HOUR,
    Training,
    events_of,
    gpus,
    inventory_of,
    make_matrix,
    samples_of,
    write_dataset,
    xid,
)

DAY = 24 * HOUR
EVENTS = [xid(20, "gpu01", "node0"), xid(40.5, "gpu05", "node1"), xid(44, "gpu05", "node1", code="63")]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    inventory = inventory_of(gpus(8))
    path = tmp_path_factory.mktemp("taken") / "data"
    return write_dataset(path, inventory, samples=samples_of(inventory, 60, seed=4), events=events_of(EVENTS))


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch) -> None:
    monkeypatch.setattr(slabs, "SLAB_ROWS", 100)


def build(dataset: Dataset, out: Path, features: FeatureSection, **options) -> FeatureMatrix:
    return make_matrix(dataset, out, features=features, training=Training(3, 4), **options)


def content(matrix: FeatureMatrix) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in matrix.path.iterdir()}


sections = st.builds(
    FeatureSection,
    groups=st.lists(st.sampled_from(GROUPS), min_size=1, unique=True).map(tuple),
    windows=st.sampled_from([(HOUR,), (HOUR, 4 * HOUR), (8 * HOUR,)]),
    peer_window=st.sampled_from([2 * HOUR, 3 * HOUR]),
    onset=st.sampled_from([((HOUR, 6 * HOUR),), ((HOUR, 6 * HOUR), (6 * HOUR, 24 * HOUR))]),
    history_windows=st.sampled_from([(DAY,), (HOUR, DAY)]),
    history_scopes=st.sampled_from([("gpu", "slot", "node"), ("gpu",)]),
    static=st.sampled_from(["auto", ("age",)]),
    channels=st.sampled_from(["auto", ("gpu_temp_c", "ecc_sbe_volatile_total")]),
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(before=sections, after=sections)
def test_whatever_changes_the_matrix_is_the_one_built_anew(dataset, before, after):
    with tempfile.TemporaryDirectory() as name:
        build(dataset, Path(name) / "m", before)
        changed = build(dataset, Path(name) / "m", after)
        assert content(changed) == content(build(dataset, Path(name) / "anew", after))


@pytest.fixture
def read(monkeypatch) -> list[int]:
    found: list[int] = []
    original = Dataset.read_runs
    monkeypatch.setattr(Dataset, "read_runs", lambda self, *a, **k: found.append(a[0]) or original(self, *a, **k))
    return found


WHOLE = FeatureSection(windows=(HOUR,), peer_window=2 * HOUR, onset=((HOUR, 6 * HOUR),), history_windows=(DAY,))


@pytest.mark.parametrize(
    "change",
    [
        {"history_windows": (HOUR, DAY)},
        {"static": ("age",)},
        {"groups": ("telemetry", "peers", "onset", "gaps", "workload")},
        {"groups": ("history", "static")},
    ],
)
def test_what_needs_no_samples_reads_none(dataset, tmp_path, read, change):
    build(dataset, tmp_path / "m", WHOLE)
    read.clear()
    changed = build(dataset, tmp_path / "m", WHOLE.model_copy(update=change))
    assert read == []
    assert content(changed) == content(build(dataset, tmp_path / "anew", WHOLE.model_copy(update=change)))


def test_a_group_more_computes_that_group_alone(dataset, tmp_path, monkeypatch):
    planned: list[set[str]] = []
    begin = build_tasks.Build.__init__

    def noted(self, *given) -> None:
        begin(self, *given)
        planned.append({column.group for column in self.plan.columns})

    monkeypatch.setattr(build_tasks.Build, "__init__", noted)
    fewer = WHOLE.model_copy(update={"groups": tuple(group for group in GROUPS if group != "workload")})
    build(dataset, tmp_path / "m", fewer)
    build(dataset, tmp_path / "m", WHOLE)
    assert planned[1] == {"workload"}
    # onset looks back furthest of all: without it, the level of a counter may be too old to be known
    build(dataset, tmp_path / "m", WHOLE.model_copy(update={"onset": ((HOUR, 12 * HOUR),)}))
    assert planned[2] == {"telemetry", "peers", "onset", "gaps", "workload"}


def test_other_labels_make_other_rows_and_everything_anew(dataset, tmp_path, read):
    build(dataset, tmp_path / "m", WHOLE)
    read.clear()
    labels = LabelSection(horizon=12 * HOUR)
    changed = build(dataset, tmp_path / "m", WHOLE, labels=labels)
    assert sorted(set(read)) == dataset.buckets()
    assert content(changed) == content(build(dataset, tmp_path / "anew", WHOLE, labels=labels))


def test_a_killed_change_goes_on_and_leaves_the_old_matrix_until_then(dataset, tmp_path, monkeypatch):
    old = build(dataset, tmp_path / "m", WHOLE).digest
    other = WHOLE.model_copy(update={"peer_window": 4 * HOUR, "windows": (2 * HOUR,)})
    monkeypatch.setattr(building, "HELD_ROWS", 0)
    with monkeypatch.context() as patched:
        patched.setattr(build_tasks.Build, "part", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build(dataset, tmp_path / "m", other)
    assert FeatureMatrix.open(tmp_path / "m").digest == old
    assert content(build(dataset, tmp_path / "m", other)) == content(build(dataset, tmp_path / "anew", other))
