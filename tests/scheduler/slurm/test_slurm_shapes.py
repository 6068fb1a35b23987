"""Whatever shape an answer of Slurm has, it is read, or an error that names it: a bug in it ends no round."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.ports.errors import SchedulerError
from scheduler.slurm.commands import SlurmCommands
from scheduler.slurm.job import views_by_node
from scheduler.slurm.marks import view_of
from scheduler.slurm.port import errors_in, kind_of
from scheduler.slurm.settings import SlurmSettings
from tests.policy.decide_world import T0
from tests.scheduler.slurm.fake_slurm import job_row, node_row, number_of

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
NODE, JOB = node_row(0, number_of(0), number_of(1770000000)), job_row(5, "n0", comment="predrain.checkpoint=B:USR1")


def rows(row):
    """A row with some of its fields replaced by anything."""
    return st.dictionaries(st.sampled_from(sorted(row)), ANY, max_size=4).map(lambda change: {**row, **change})


def reports(key, row):
    """A report with such rows, or of any shape at all."""
    whole = st.fixed_dictionaries({key: st.lists(rows(row), max_size=2)}, optional={"meta": ANY, "errors": ANY})
    return st.one_of(whole, whole, st.fixed_dictionaries({key: ANY}), ANY)


class Answering(SlurmCommands):
    """Slurm's commands, each of which ends with the given output."""

    def __init__(self, status, errors, output):
        super().__init__(SETTINGS)
        self.ended = status, errors, output

    def _run(self, *_):
        return self.ended


@settings(max_examples=100, deadline=None)
@given(
    report=reports("nodes", NODE), jobs=reports("jobs", JOB), status=st.sampled_from([0, 0, 0, 1]),
    before=st.sampled_from(["", "debug: x\n", "{"]),
)  # fmt: skip
def test_a_report_of_any_shape_is_read_or_an_error(report, jobs, status, before):
    def output(content):
        return (before + (content if isinstance(content, str) else json.dumps(content))).encode("utf-8", "replace")

    for content in (report, jobs):
        errors = errors_in(output(content))
        assert errors is None or kind_of(errors)
    try:
        nodes = Answering(status, "", output(report)).nodes()
    except SchedulerError:
        nodes = ()
    try:
        held = Answering(status, "", output(jobs)).jobs("n0")
    except SchedulerError:
        held = ()
    views = views_by_node(held)
    for node in nodes:
        view = view_of(node, views.get(node.name, ()), SETTINGS, T0)
        assert view.scopes
        assert node.version
    for job in held:
        assert job.checkpointed_at is None or job.checkpointed_at.tzinfo
        assert job.answers or job.signal or not job.stays_by_wish or job.view()
