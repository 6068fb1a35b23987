"""An answer that is no whole list of nodes is an error, and never an empty fleet: both schedulers."""

import itertools
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foundation.kubernetes.client as client_module
from foundation.kubernetes.api import Unreachable
from foundation.kubernetes.client import KubernetesClient
from scheduler.ports.errors import SchedulerError
from scheduler.slurm.commands import SlurmCommands
from scheduler.slurm.job import views_by_node
from scheduler.slurm.marks import view_of
from scheduler.slurm.port import errors_in, kind_of
from scheduler.slurm.settings import SlurmSettings
from tests.policy.decide_world import T0
from tests.scheduler.kubernetes.api_world import World, served
from tests.scheduler.kubernetes.fleet import NAMES, Fleet
from tests.scheduler.kubernetes.objects import add, node
from tests.scheduler.slurm.fake_slurm import job_row, node_row, number_of

VERSION = {"resourceVersion": "7"}
GOOD = node("n0")
KUBERNETES = {
    "no items": {"kind": "NodeList", "metadata": VERSION},
    "null items": {"metadata": VERSION, "items": None},
    "items that are an object": {"metadata": VERSION, "items": {"n0": GOOD}},
    "items that are a text": {"metadata": VERSION, "items": "n0"},
    "an item that is a text": {"metadata": VERSION, "items": [GOOD, "n1"]},
    "an item that is null": {"metadata": VERSION, "items": [GOOD, None]},
    "an item that is a list": {"metadata": VERSION, "items": [[GOOD]]},
    "no metadata": {"items": []},
    "metadata that are null": {"metadata": None, "items": []},
    "metadata that are a list": {"metadata": ["7"], "items": []},
    "no version": {"metadata": {}, "items": []},
    "a version that is a number": {"metadata": {"resourceVersion": 7}, "items": []},
    "a token that is an object": {"metadata": {**VERSION, "continue": {"a": 1}}, "items": []},
    "a token that never changes": {"metadata": {**VERSION, "continue": "x"}, "items": []},
    "another object": GOOD,
    "a status": {"kind": "Status", "status": "Success", "metadata": {}},
    "nothing": {},
}


@pytest.fixture(scope="module")
def marked() -> Iterator[tuple[World, Fleet]]:
    world = World()
    add(world, *(node(name) for name in NAMES))
    with served(world) as cluster:
        fleet = Fleet(cluster, world)
        fleet.scored(n1=0.4)
        fleet.round()
        assert fleet.ours("n1")
        yield world, fleet


@pytest.mark.parametrize("answer", KUBERNETES)
def test_what_is_no_list_of_nodes_of_kubernetes_is_an_error_and_changes_nothing(marked, answer):
    world, fleet = marked
    world.fail("GET", "nodes$", 200, content=KUBERNETES[answer], times=99)
    try:
        with pytest.raises(Unreachable):
            fleet.cluster.list_all("/api/v1/nodes", {}, lambda item: item)
        report = fleet.round()
    finally:
        world.faults.clear()
    assert any("scheduler" in error for error in report.errors), report
    assert report.plan is None
    assert fleet.ours("n1") == ["PreferNoSchedule"]
    assert not fleet.round().errors


def test_pages_that_always_name_another_one_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = itertools.count()

    class Endless(KubernetesClient):
        def __init__(self) -> None:
            self.pages = 0

        def get(self, *_: Any, **__: Any) -> Any:
            self.pages += 1
            return {"metadata": {**VERSION, "continue": f"t{next(tokens)}"}, "items": [GOOD]}

    endless = Endless()
    monkeypatch.setattr(client_module, "_MAX_PAGES", 5)
    with pytest.raises(Unreachable, match="does not end after 5 pages"):
        endless.list_all("/api/v1/nodes", {}, lambda item: item)
    assert endless.pages == 5


NODE = node_row(0, number_of(0), number_of(1770000000))
META = {"plugin": {"data_parser": "data_parser/v0.0.42"}}
SLURM = {
    "nothing": "",
    "no JSON": "slurm_load_node error: Unable to contact slurm controller",
    "half a report": json.dumps({"meta": META, "nodes": [NODE]})[:-40],
    "null": "null",
    "a list": json.dumps([NODE]),
    "no nodes in it": json.dumps({"meta": META}),
    "nodes that are null": json.dumps({"meta": META, "nodes": None}),
    "nodes that are an object": json.dumps({"meta": META, "nodes": {"n0": NODE}}),
    "no node": json.dumps({"meta": META, "nodes": []}),
    "a row that is a text": json.dumps({"meta": META, "nodes": [NODE, "n1"]}),
    "a row that is null": json.dumps({"meta": META, "nodes": [NODE, None]}),
    "a row without a name": json.dumps({"meta": META, "nodes": [NODE, {**NODE, "name": None}]}),
    "errors beside rows": json.dumps({"meta": META, "nodes": [NODE], "errors": [{"error": "partial"}]}),
    "deep nesting": "[" * 100_000,
}


class Answering(SlurmCommands):
    """Slurm's commands, each of which ends with the given output."""

    def __init__(self, output: str | bytes, status: int = 0) -> None:
        super().__init__(SlurmSettings("/nowhere"))
        self.ended = status, "", output.encode() if isinstance(output, str) else output

    def _run(self, *_: str) -> tuple[int, str, bytes]:
        return self.ended


@pytest.mark.parametrize("answer", SLURM)
def test_what_is_no_list_of_nodes_of_slurm_is_an_error(answer: str) -> None:
    with pytest.raises(SchedulerError):
        Answering(SLURM[answer]).nodes()


def test_a_node_that_slurm_lists_for_each_partition_is_one_and_two_of_a_name_stay_two() -> None:
    same = json.dumps({"meta": META, "nodes": [NODE, NODE]})
    assert len(Answering(same).nodes()) == 1
    other = {**NODE, "weight": 9}
    assert len(Answering(json.dumps({"meta": META, "nodes": [NODE, other]})).nodes()) == 2


def test_a_mark_is_released_after_answers_that_were_none(marked: tuple[World, Fleet]) -> None:
    world, fleet = marked
    fleet.later(timedelta(days=2))
    world.fail("GET", "nodes$", 200, content=KUBERNETES["null items"], times=99)
    fleet.round()
    assert fleet.ours("n1")
    world.faults.clear()
    fleet.round()
    assert fleet.ours("n1") == []


SETTINGS = SlurmSettings("/nowhere", rack_prefix="r", domain_prefix="d")
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
    | st.sampled_from(["n[0-", "gpu:x:9", "(null)", "NODE_FAIL+DRAIN", '{"predrain": 1}', "1e99", "predrain: x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["set", "infinite", "number", "name", "error", "plugin", "data_parser"]) | st.text(max_size=4),
        inner, max_size=3,
    ),
    max_leaves=6,
)  # fmt: skip
JOB = job_row(5, "n0", comment="predrain.checkpoint=B:USR1")


def rows(row: dict[str, Any]) -> Any:
    """A row with some of its fields replaced by anything."""
    return st.dictionaries(st.sampled_from(sorted(row)), ANY, max_size=4).map(lambda change: {**row, **change})


def reports(key: str, row: dict[str, Any]) -> Any:
    """A report with such rows, or of any shape at all."""
    whole = st.fixed_dictionaries({key: st.lists(rows(row), max_size=2)}, optional={"meta": ANY, "errors": ANY})
    return st.one_of(whole, whole, st.fixed_dictionaries({key: ANY}), ANY)


@settings(max_examples=100, deadline=None)
@given(
    report=reports("nodes", NODE), jobs=reports("jobs", JOB), status=st.sampled_from([0, 0, 0, 1]),
    before=st.sampled_from(["", "debug: x\n", "{"]),
)  # fmt: skip
def test_a_report_of_any_shape_is_read_or_an_error(report: Any, jobs: Any, status: int, before: str) -> None:
    def output(content: Any) -> bytes:
        return (before + (content if isinstance(content, str) else json.dumps(content))).encode("utf-8", "replace")

    for content in (report, jobs):
        errors = errors_in(output(content))
        assert errors is None or kind_of(errors)
    try:
        nodes = Answering(output(report), status).nodes()
    except SchedulerError:
        nodes = ()
    try:
        held = Answering(output(jobs), status).jobs("n0")
    except SchedulerError:
        held = ()
    views = views_by_node(held)
    for item in nodes:
        view = view_of(item, views.get(item.name, ()), SETTINGS, T0)
        assert view.scopes
        assert item.version
    for job in held:
        assert job.checkpointed_at is None or job.checkpointed_at.tzinfo
        assert job.view().gpus > 0
        assert job.opt_out is None or "predrain" in job.comment.lower()
