"""Our marks on a Slurm node: what is written, what is read back, and what is never touched."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.fleet import Level
from scheduler.ports.ownership import DamagedRecordError, OwnershipRecord
from scheduler.slurm.marks import (
    after,
    change_for,
    dated,
    reason_for,
    record_in,
    slurm_marks_on,
    view_of,
    weight_again,
    with_record,
)  # fmt: skip
from scheduler.slurm.node import SlurmNode, node_of
from scheduler.slurm.settings import HIGHEST_WEIGHT, SlurmSettings
from tests.policy.decide_world import T0
from tests.scheduler.slurm.slurm_world import action, release

SETTINGS = SlurmSettings("/nowhere", rack_prefix="rack_")
NODE = SlurmNode("n0", frozenset({"MIXED"}), weight=3, gpus=8, partitions=("g",), extra='{"a": 1}')
HOUR = timedelta(hours=1)
EXTRAS = st.one_of(
    st.text(max_size=40).filter(lambda text: '"predrain"' not in text),
    st.dictionaries(st.text(max_size=5), st.integers() | st.lists(st.text(max_size=3), max_size=2), max_size=3).map(
        json.dumps
    ),
    st.sampled_from(["", "{}", "{ }", ' {"a": {"b": 1}} ', "x {", "}{"]),
).filter(lambda text: "predrain" not in text)


def done(node: SlurmNode, *verbs: str, settings: SlurmSettings = SETTINGS) -> SlurmNode:
    for verb in verbs:
        node = after(node, change_for(action(verb), node, settings, T0))
        if node.out:
            node = replace(node, user="root", reason_at=T0)
    return node


@given(extra=EXTRAS, tier=st.sampled_from(["watch", "high"]), risk=st.none() | st.floats(0, 1))
def test_a_record_goes_into_any_extra_and_out_again_and_leaves_the_rest(extra, tier, risk):
    record = OwnershipRecord(tier, risk, T0, Level.AVOID, weight=3, soft=1_000_003)
    held = with_record(extra, record, "n0", "predrain")
    result = record_in(held, "n0", "predrain")
    assert replace(result, risk=None) == replace(record, risk=None)
    other = replace(record, level=Level.DRAIN, drain_at=T0, risk=None)
    again = with_record(held, other, "n0", "predrain")
    assert record_in(again, "n0", "predrain") == other
    left = with_record(again, None, "n0", "predrain")
    try:
        others = json.loads(extra or "{}")
    except ValueError:
        others = None
    if not isinstance(others, dict):
        assert left == (extra if extra.strip(" \t\r\n") else "")  # blanks before a record are those of its JSON
        return
    assert json.loads(left or "{}") == others
    for around in ({**json.loads(held), "b": 2}, {"b": 2, **json.loads(held)}):  # jobs can filter by an object
        assert json.loads(with_record(json.dumps(around), None, "n0", "predrain")) == others | {"b": 2}


def test_text_that_is_added_after_the_record_stays_and_the_record_is_read():
    record = OwnershipRecord("high", 0.5, T0, Level.AVOID, weight=3, soft=1_000_003)
    noted = with_record("rack=7", record, "n0", "predrain") + " ops note"
    assert record_in(noted, "n0", "predrain") == record
    assert with_record(noted, None, "n0", "predrain") == "rack=7 ops note"


def edited(change) -> str:
    """An extra whose record somebody changed by hand."""
    content = json.loads(
        with_record("", OwnershipRecord("high", 0.5, T0 + HOUR, Level.AVOID, weight=3, soft=9), "n0", "predrain")
    )
    change(content["predrain"])
    return json.dumps(content)


@pytest.mark.parametrize(
    "extra",
    [
        '{"predrain": 3}',
        '{"predrain":{"tier":"high"}}',
        '{"predrain":{}} {"predrain":{}}',
        edited(lambda record: record.update(level="swap")),
        edited(lambda record: record.update(until="2026-09-01T00:00:00+00:00")),
        edited(lambda record: record.update(weight=1)),
        edited(lambda record: record.update(note="RMA 4711")),
        edited(lambda record: record.pop("seal")),
        edited(lambda record: record.update(seal="0" * 12)),
        with_record("", OwnershipRecord("high", 0.5, T0 + HOUR, Level.AVOID, weight=3, soft=9), "n1", "predrain"),
    ],
)
def test_an_edited_or_copied_record_proves_nothing_and_is_reported(extra):
    with pytest.raises(DamagedRecordError):
        record_in(extra, "n0", "predrain")
    drained = replace(NODE, states=frozenset({"IDLE", "DRAIN"}), reason=reason_for(action("swap"), T0 + HOUR))
    for node in (replace(NODE, extra=extra), replace(drained, extra=extra)):
        assert all(change_for(action(verb), node, SETTINGS, T0).empty for verb in ("publish", "avoid", "swap"))
        assert change_for(release(), node, SETTINGS, T0).empty
        view = view_of(node, (), SETTINGS, T0)
        assert view.opt_out is not None
        assert view.notice is not None


def test_a_record_that_a_tool_wrote_again_in_its_own_way_is_intact():
    record = OwnershipRecord("high", 0.5, T0 + HOUR, Level.AVOID, weight=3, soft=9)
    content = json.loads(with_record('{"a": 1}', record, "n0", "predrain"))
    again = json.dumps({"predrain": dict(sorted(content["predrain"].items(), reverse=True)), "b": 2}, indent=2)
    assert record_in(again, "n0", "predrain") == record


@given(message=st.text(max_size=300), risk=st.none() | st.floats(0, 1))
def test_a_reason_reports_tier_risk_and_end_and_survives_scontrol(message, risk):
    end = T0 + timedelta(hours=6, microseconds=5)
    reason = reason_for(replace(action("swap", risk=risk), reasons=(message,)), end)
    assert len(reason) <= 240
    assert reason == reason.strip().strip('"')
    assert reason.startswith("predrain: tier=high risk=")
    assert "until=2026-03-01T06:00:01Z" in reason


def test_each_action_adds_to_the_marks_and_a_second_one_changes_nothing():
    node, levels = NODE, []
    for verb in ("publish", "avoid", "swap", "drain"):
        node = done(node, verb)
        levels.append(slurm_marks_on(node, SETTINGS, T0).marks.level)
        assert change_for(action(verb), node, SETTINGS, T0 + HOUR).empty
    assert levels == [Level.PUBLISH, Level.AVOID, Level.SWAP, Level.DRAIN]
    assert (node.weight, node.states) == (1_000_003, frozenset({"MIXED", "DRAIN"}))
    marks = slurm_marks_on(node, SETTINGS, T0).marks
    assert (marks.published.expires_at, marks.hard_since) == (T0 + 6 * HOUR, T0)


def test_a_release_gives_back_what_was_found():
    node = done(NODE, "publish", "avoid", "swap", "drain")
    half = after(node, change_for(release(to=Level.AVOID), node, SETTINGS, T0))
    level = slurm_marks_on(half, SETTINGS, T0).marks.level
    assert (half.out, half.weight, level) == (frozenset(), 1_000_003, Level.AVOID)
    assert not slurm_marks_on(half, SETTINGS, T0).marker_removed
    assert after(node, change_for(release(), node, SETTINGS, T0)) == replace(NODE, user="root", reason_at=T0)
    assert after(half, change_for(release(), half, SETTINGS, T0)) == replace(NODE, user="root", reason_at=T0)


def test_a_prediction_that_is_renewed_renews_the_reason_too():
    node = done(NODE, "publish", "swap")
    change = change_for(action("publish", hours=12), node, SETTINGS, T0 + HOUR)
    assert (change.state, change.weight) == (None, None)
    assert "until=2026-03-01T12:00:00Z" in change.reason
    marks = slurm_marks_on(after(node, change), SETTINGS, T0 + HOUR).marks
    assert marks.tainted
    assert marks.hard_since == T0


def test_a_weight_that_a_person_set_is_theirs():
    node = replace(done(NODE, "publish", "avoid"), weight=77)
    ours = slurm_marks_on(node, SETTINGS, T0)
    assert (ours.marks.soft, ours.marker_removed) == (False, True)
    assert weight_again(node, SETTINGS, T0).empty
    assert change_for(release(), node, SETTINGS, T0).weight is None


def test_a_weight_at_the_upper_end_stays_in_range():
    node = done(replace(NODE, weight=HIGHEST_WEIGHT - 5), "avoid")
    assert node.weight == HIGHEST_WEIGHT
    assert after(node, change_for(release(), node, SETTINGS, T0)).weight == HIGHEST_WEIGHT - 5


@pytest.mark.parametrize("state", ["DRAIN", "FAIL", "DOWN"])
def test_on_a_node_with_another_reason_nothing_is_written_but_our_own_taken_back(state):
    node = done(NODE, "publish", "avoid", "swap")
    states = frozenset({"DOWN"}) if state == "DOWN" else frozenset({"MIXED", state})
    node = replace(node, states=states, reason="ann looks at it", user="ann")
    assert slurm_marks_on(node, SETTINGS, T0).foreign == "reason 'ann looks at it' of ann"
    for verb in ("publish", "avoid", "swap", "drain"):
        assert change_for(action(verb), node, SETTINGS, T0).empty
    change = change_for(release(), node, SETTINGS, T0)
    assert (change.state, change.reason, change.extra, change.weight) == (None, None, '{"a": 1}', 3)
    view = view_of(node, (), SETTINGS, T0)
    assert view.opt_out is not None
    assert view.marker_removed
    assert (view.cordoned_by is not None) == (state in ("DRAIN", "FAIL"))


def taken_over(**changed: object) -> SlurmNode:
    """A node that predrain drained, read back and recorded, and that somebody changed since."""
    node = done(NODE, "publish", "swap")
    node = after(node, dated(node, SETTINGS, T0))
    return replace(node, **{name: change(node) if callable(change) else change for name, change in changed.items()})


TAKEN_OVER = {
    "a ticket appended": {"reason": lambda node: f"{node.reason} - RMA 4711 opened, keep out"},
    "Slurm's own words": {"reason": lambda node: f"{node.reason} : reboot issued"},
    "a word taken off": {"reason": lambda node: node.reason[:-4]},
    "another case": {"reason": lambda node: node.reason.upper()},
    "another blank": {"reason": lambda node: node.reason + " "},
    "a health check before it": {"reason": lambda node: f"NHC: {node.reason}"},
    "only our first words": {"reason": lambda node: node.reason.partition(";")[0]},
    "a later end": {"reason": lambda node: node.reason.replace("T06", "T23")},
    "the same words set again": {"reason_at": T0 + HOUR},
    "no predrain record": {"extra": '{"a": 1}'},
    "the record of another node": {"name": "n1"},
    "a drain of Slurm's own, whose reason is ours": {"states": frozenset({"IDLE", "DRAIN", "FAIL"})},
}


@pytest.mark.parametrize("changed", TAKEN_OVER.values(), ids=TAKEN_OVER.keys())
def test_a_drain_that_somebody_edited_or_took_over_is_theirs_and_stays_round_after_round(changed):
    node = taken_over(**changed)
    view = view_of(node, (), SETTINGS, T0)
    assert (view.marks.tainted, view.cordoned_by is not None, view.opt_out is not None) == (False, True, True)
    assert view.notice is not None
    for _ in range(3):
        for verb in ("publish", "avoid", "swap", "drain"):
            assert change_for(action(verb), node, SETTINGS, T0).empty
        change = change_for(release(), node, SETTINGS, T0)
        assert (change.state, change.reason) == (None, None)
        node = after(node, change)
        assert (node.out, node.reason) == (taken_over(**changed).out, taken_over(**changed).reason)


def test_a_drain_in_our_form_is_its_writers():
    reason = taken_over().reason
    node = replace(NODE, states=frozenset({"IDLE", "DRAIN"}), reason=reason, user="ann")
    assert not slurm_marks_on(node, SETTINGS, T0).marks.tainted
    assert change_for(release(), node, SETTINGS, T0).empty
    assert "no predrain record" in (view_of(node, (), SETTINGS, T0).notice or "")


def test_marks_of_another_installation_stay():
    node, other = taken_over(), replace(SETTINGS, installation="other")
    assert all(change_for(action(verb), node, other, T0).empty for verb in ("publish", "avoid", "swap", "drain"))
    assert change_for(release(), node, other, T0).empty
    view = view_of(node, (), other, T0)
    assert (view.marks.tainted, view.cordoned_by is not None, view.opt_out is not None) == (False, True, True)
    assert view.notice == "its predrain markers belong to another installation, predrain"


@pytest.mark.parametrize("user", ["root", "64030", "nobody", None])
def test_what_was_drained_and_recorded_is_ours_and_goes_however_its_user_is_resolved(user):
    node = taken_over(user=user)
    assert slurm_marks_on(node, SETTINGS, T0).marks.tainted
    assert view_of(node, (), SETTINGS, T0).notice is None
    assert dated(node, SETTINGS, T0).empty
    assert change_for(release(), node, SETTINGS, T0).state == "UNDRAIN"
    renewed = after(node, change_for(action("publish", hours=12), node, SETTINGS, T0 + HOUR))
    assert slurm_marks_on(replace(renewed, reason_at=T0 + HOUR), SETTINGS, T0 + HOUR).marks.tainted


@pytest.mark.parametrize(
    ("flag", "by"), [("REBOOT_REQUESTED", "reboot"), ("REBOOT_ISSUED", "reboot"), ("POWER_DRAIN", "power-down")]
)
def test_nothing_is_written_to_a_node_that_reboots(flag, by):
    node = taken_over(states=frozenset({"DOWN", "DRAIN", flag}))
    assert all(change_for(action(verb), node, SETTINGS, T0).empty for verb in ("publish", "avoid", "drain"))
    assert change_for(release(), node, SETTINGS, T0).empty
    view = view_of(node, (), SETTINGS, T0)
    assert (view.owner, view.unwritable is not None, view.down) == (f"a {by}", True, False)
    theirs = replace(NODE, states=frozenset({"MIXED", "DRAIN", flag}), reason="POWER_DOWN_ASAP", user="root")
    assert (view_of(theirs, (), SETTINGS, T0).counted, view_of(theirs, (), SETTINGS, T0).down) == (False, False)


RESTING = [
    ["IDLE", "POWERED_DOWN"], ["IDLE+CLOUD+POWERED_DOWN"], ["idle~"], ["idle#"], ["idle%"], ["alloc#"], ["mixed!"],
    ["IDLE", "CLOUD", "POWERING_UP", "NOT_RESPONDING"], ["IDLE", "POWERING_DOWN"], ["IDLE+POWER_DOWN"], ["idle$"],
    ["IDLE", "MAINTENANCE"], ["MAINT"], ["DOWN", "REBOOT_ISSUED"], ["idle@"], ["down^"], ["DRAIN", "REBOOT_ISSUED"],
    ["IDLE", "DYNAMIC_NORM", "POWERED_DOWN"], ["pow_dn"], ["MIXED", "DRAIN", "POWER_DOWN", "POWER_DRAIN"],
]  # fmt: skip
AWAKE = [["IDLE"], ["idle-"], ["IDLE", "PLANNED"], ["plnd"], ["MIXED", "RESERVED"], ["resv"], ["ALLOCATED", "CLOUD"],
         ["IDLE", "DYNAMIC_NORM"], ["IDLE", "BLOCKED"]]  # fmt: skip
FAILED = [["DOWN"], ["down*"], ["idle*"], ["IDLE", "NOT_RESPONDING"], ["ERROR"], ["IDLE", "INVAL"],
          ["DOWN", "POWERED_DOWN"], ["DOWN", "CLOUD", "POWERING_UP"]]  # fmt: skip


def row(states: list[str], **others: object) -> dict[str, object]:
    text = states[0] if len(states) == 1 and states[0].islower() else states
    base = {"name": "n0", "state": text, "reason": "", "extra": "", "weight": 1, "gres": "gpu:8", "partitions": ["g"]}
    return {**base, **others}


def known(states: list[str], reason: str = "") -> tuple[object, ...]:
    view = view_of(node_of(row(states, reason=reason), "gpu"), (), SETTINGS, T0)
    assert view.readable
    return view.down, view.resting is not None, view.why_out_of_service, view.counted


@pytest.mark.parametrize("states", RESTING, ids="+".join)
def test_a_node_at_rest_is_neither_down_nor_out_of_service(states):
    assert known(states, reason="x" if "DRAIN" in states else "") == (False, True, None, False)


@pytest.mark.parametrize("states", AWAKE, ids="+".join)
def test_a_node_that_is_planned_or_reserved_is_in_service(states):
    assert known(states) == (False, False, None, True)


@pytest.mark.parametrize("states", FAILED, ids="+".join)
def test_a_node_that_failed_is_down_whatever_its_power(states):
    assert known(states) == (True, False, "down", True)


def test_a_node_that_was_drained_by_others_and_powered_down_is_out_of_service():
    assert known(["IDLE", "DRAIN", "POWERED_DOWN"], "bad disk")[2] is not None


@pytest.mark.parametrize("changed", [{"partitions": ("other",)}, {"gpus": 0}, {"states": frozenset({"FUTURE"})}])
def test_marks_on_a_node_that_left_the_fleet_are_to_be_removed(changed):
    view = view_of(replace(NODE, **changed), (), replace(SETTINGS, partitions=("g",)), T0)
    assert view.opt_out is not None
    assert view_of(NODE, (), replace(SETTINGS, partitions=("g",)), T0).opt_out is None


@pytest.mark.parametrize(
    "feature", ["predrain_unmanaged", "PREDRAIN_UNMANAGED", "predrain-unmanaged", "predrain.unmanaged"]
)
def test_the_opt_out_feature_is_read_in_any_spelling(feature):
    assert view_of(replace(NODE, features=("a", feature)), (), SETTINGS, T0).opt_out is not None


@pytest.mark.parametrize(
    "changed",
    [
        {"states": frozenset({"IDLE", "DRAIN"}), "reason": None},
        {"states": frozenset({"UNKNOWN"})},
        {"complete": False},
        {"states": frozenset({"DRAIN"}), "reason": None},
    ],
)
def test_a_node_that_cannot_be_read_is_left_alone_releases_included(changed):
    node = replace(done(NODE, "publish", "avoid"), **changed)
    assert not view_of(node, (), SETTINGS, T0).readable
    assert change_for(release(), node, SETTINGS, T0).empty
    assert change_for(action("swap"), node, SETTINGS, T0).empty


def test_the_version_follows_people_and_tools_not_jobs_and_pings():
    busy = replace(NODE, states=frozenset({"ALLOCATED", "NOT_RESPONDING", "BLOCKED"}))
    assert busy.version == NODE.version
    for changed in ({"reason": "x"}, {"user": "x"}, {"reason_at": T0}, {"extra": ""}, {"weight": 4}):
        assert replace(NODE, **changed).version != NODE.version
    assert replace(NODE, states=frozenset({"MIXED", "DRAIN"})).version != NODE.version


def test_place_opt_out_and_owner_come_from_features_and_states():
    node = replace(NODE, features=("rack_b7", "predrain_unmanaged", "grp_x"))
    view = view_of(node, (), replace(SETTINGS, group_prefix="grp_"), T0)
    assert (view.rack, view.group, view.domain) == ("b7", "x", None)
    assert view.opt_out == "feature predrain_unmanaged"
    assert view_of(NODE, (), SETTINGS, T0).group == "g"
    assert view_of(replace(NODE, states=frozenset({"IDLE", "MAINT"})), (), SETTINGS, T0).maintenance is not None
    assert view_of(NODE, (), SETTINGS, T0).maintenance is None
    assert view_of(replace(NODE, states=frozenset({"IDLE", "REBOOT_REQUESTED"})), (), SETTINGS, T0).owner == "a reboot"


@pytest.mark.parametrize(
    "row",
    [
        {  # 22.05, v0.0.38
            "name": "n1", "state": "mixed", "state_flags": ["DRAIN"], "reason": "r", "reason_changed_at": 1771000000,
            "reason_set_by_user": "ann", "extra": "e", "weight": 7, "boot_time": 1770000000, "gres": "gpu:h100:8",
            "features": "a,b", "active_features": "a", "partitions": ["g"],
        },
        {  # 23.11 and later
            "name": "n1", "state": ["MIXED", "DRAIN"], "reason": "r",
            "reason_changed_at": {"set": True, "infinite": False, "number": 1771000000}, "reason_set_by_user": "ann",
            "extra": "e", "weight": 7, "boot_time": {"set": True, "infinite": False, "number": 1770000000},
            "gres": "gpu:h100:8(S:0-1)", "features": ["a", "b"], "active_features": ["a"], "partitions": ["g"],
        },
    ],
)  # fmt: skip
def test_old_and_new_shapes_read_alike(row):
    node = node_of(row, "gpu")
    assert (node.states, node.reason, node.user, node.extra) == ({"MIXED", "DRAIN"}, "r", "ann", "e")
    assert (node.weight, node.gpus, node.features, node.partitions, node.complete) == (7, 8, ("a", "b"), ("g",), True)
    assert (node.reason_at - node.booted_at).total_seconds() == 1_000_000
    assert node.inactive == {"b"}
    for key in ("reason", "extra", "weight", "state"):
        assert not node_of({k: v for k, v in row.items() if k not in (key, f"{key}_flags")}, "gpu").complete
