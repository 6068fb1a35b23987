"""Only what predrain recorded, and nobody changed since, is predrain's."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from policy.fleet import Level, NodeView
from policy.plan import Action
from scheduler.ports.node_object import Keys, NodeObject, Taint, after, marks_of, view_of
from scheduler.ports.ownership import DamagedRecordError, OwnershipRecord, digest_of, foreign_marks, sealed, unsealed
from tests.policy.decide_world import HOUR, T0

KEYS = Keys(avoid="team.example/avoid=yes")
THEIRS = NodeObject("n", {"zone": "a"}, {"note": "theirs"}, (Taint("team", "a", "NoSchedule"),))
RECORD = OwnershipRecord("high", 0.5, T0 + HOUR, Level.SWAP).with_mark("reason", "a b")
Change = Callable[[NodeObject], NodeObject]


def action(verb: str, to: Level) -> Action:
    return Action(verb, "n", "high", to, 0.9, None if verb == "release" else T0 + 12 * HOUR, ("why",))


FORWARD = [
    action("publish", Level.PUBLISH), action("avoid", Level.AVOID), action("swap", Level.SWAP),
    action("drain", Level.DRAIN),
]  # fmt: skip
RELEASE = action("release", Level.NONE)


def drained() -> NodeObject:
    node = THEIRS
    for step in FORWARD:
        node = after(step, node, KEYS, T0)
    return node


def annotated(key: str, change: Callable[[str], str | None]) -> Change:
    def edit(node: NodeObject) -> NodeObject:
        text = change(node.annotations[key])
        rest = {name: value for name, value in node.annotations.items() if name != key}
        return replace(node, annotations=rest if text is None else {**rest, key: text})

    return edit


def tainted(**fields: object) -> Change:
    """Change predrain's hard taint."""

    def edit(node: NodeObject) -> NodeObject:
        hard = next(taint for taint in node.taints if taint.effect == "NoSchedule" and taint.key == KEYS.taint)
        return replace(node, taints=tuple(replace(t, **fields) if t is hard else t for t in node.taints))

    return edit


EDITED: dict[str, Change] = {
    "another value of the taint": tainted(value="rma-4711"),
    "another case of the value": tainted(value="High"),
    "another effect of the taint": tainted(effect="NoExecute"),
    "another label": lambda node: replace(node, labels={**node.labels, KEYS.tier: "clear"}),
    "a later end": annotated(KEYS.prediction, lambda text: text.replace("2026-03-01", "2027-03-01")),
    "a note in the prediction": annotated(KEYS.prediction, lambda text: text.replace("why", "why - RMA 4711")),
    "the prediction in another layout": annotated(KEYS.prediction, lambda text: text.replace(", ", ",")),
    "an empty prediction": annotated(KEYS.prediction, lambda _: ""),
    "another start of the drain": annotated(KEYS.drain, lambda _: "2026-02-01T00:00:00+00:00"),
}
UNPROVED: dict[str, Change] = {
    "no record": annotated(KEYS.applied, lambda _: None),
    "an edited record": annotated(KEYS.applied, lambda text: text.replace('"drain"', '"avoid"')),
    "a record with more": annotated(KEYS.applied, lambda text: text.replace("{", '{"note": "RMA 4711", ', 1)),
    "a record twice": annotated(KEYS.applied, lambda text: f"[{text}, {text}]"),
    "an empty record": annotated(KEYS.applied, lambda _: ""),
    "a record that is no object": annotated(KEYS.applied, lambda _: "[1]"),
    "a copy of another node": lambda node: replace(node, name="m"),
}


def ours(node: NodeObject) -> dict[str, object]:
    return {
        **{key: value for key, value in node.labels.items() if key not in THEIRS.labels},
        **{key: value for key, value in node.annotations.items() if key not in THEIRS.annotations},
        **{taint.effect: taint for taint in node.taints if taint.key == KEYS.taint},
    }


@pytest.mark.parametrize("change", EDITED.values(), ids=EDITED.keys())
def test_a_mark_that_somebody_edited_is_theirs_and_all_else_of_ours_goes(change):
    node, base = change(drained()), NodeView("n", "c", "g")
    view = view_of(node, base, KEYS, T0)
    assert view.opt_out is not None
    assert "edited" in (view.notice or "") or "no record" in (view.notice or "")
    for step in FORWARD:
        assert after(step, node, KEYS, T0) == node, "nothing is written over"
    edited = {key: value for key, value in ours(node).items() if ours(drained()).get(key) != value}
    assert edited
    for _ in range(3):
        node = after(RELEASE, node, KEYS, T0)
        assert ours(node) == edited
        assert view_of(node, base, KEYS, T0).notice is not None, "reported until somebody removes it"
    assert marks_of(node, KEYS, T0).level is Level.NONE


@pytest.mark.parametrize("change", UNPROVED.values(), ids=UNPROVED.keys())
def test_without_an_intact_record_nothing_is_ours_and_nothing_changes(change):
    node = change(drained())
    view = view_of(node, NodeView("n", "c", "g"), KEYS, T0)
    assert (view.marks.level, view.opt_out is not None, view.cordoned_by is not None) == (Level.NONE, True, True)
    assert view.notice is not None
    for step in (*FORWARD, RELEASE):
        assert after(step, node, KEYS, T0) == node


@pytest.mark.parametrize("effect", ["NoSchedule", "PreferNoSchedule", "NoExecute"])
def test_a_taint_under_our_key_that_nobody_recorded_stays(effect):
    node = replace(THEIRS, taints=(*THEIRS.taints, Taint(KEYS.taint, "high", effect)))
    view = view_of(node, NodeView("n", "c", "g"), KEYS, T0)
    assert (view.marks.level, view.opt_out is not None) == (Level.NONE, True)
    assert all(after(step, node, KEYS, T0) == node for step in (*FORWARD, RELEASE))


def test_a_mark_is_set_beside_what_a_person_removed_and_all_of_ours_goes():
    for key in (KEYS.prediction, KEYS.drain):
        node = annotated(key, lambda _: None)(drained())
        assert view_of(node, NodeView("n", "c", "g"), KEYS, T0).notice is None
        assert after(RELEASE, node, KEYS, T0) == THEIRS
    assert after(RELEASE, drained(), KEYS, T0) == THEIRS


def test_a_record_is_of_one_node_and_of_exactly_its_content():
    content = json.loads(json.dumps(sealed(RECORD, "n")))
    assert unsealed(content, "n", "a") == RECORD
    assert unsealed(dict(reversed(content.items())), "n", "a") == RECORD
    for wrong in ({**content, "level": "avoid"}, {**content, "more": 1}, {**content, "marks": {}}, {}, None, [content]):
        with pytest.raises(DamagedRecordError):
            unsealed(wrong, "n", "a")
    with pytest.raises(DamagedRecordError):
        unsealed(content, "m", "a")


def test_a_mark_is_ours_where_it_is_exactly_the_recorded_one():
    assert foreign_marks(RECORD, {"reason": "a b"}) == {}
    assert foreign_marks(RECORD, {}) == {}
    for content in ("a  b", "A b", "a b ", "a b - RMA"):
        assert "edited" in foreign_marks(RECORD, {"reason": content})["reason"]
    assert "no record" in foreign_marks(RECORD, {"weight": "1"})["weight"]
    assert "no record" in foreign_marks(None, {"reason": "a b"})["reason"]


def test_marks_of_another_installation_stay_and_one_of_an_unnamed_one_is_ours():
    node, other = drained(), Keys(avoid=KEYS.avoid, owner="other/lease")
    for step in (*FORWARD, RELEASE):
        assert after(step, node, other, T0) == node
    view = view_of(node, NodeView("n", "c", "g"), other, T0)
    assert (view.marks.level, view.opt_out is not None, view.cordoned_by is not None) == (Level.NONE, True, True)
    assert f"of another installation, {KEYS.owner}" in (view.notice or "")
    assert "by hand" not in (view.notice or "")
    content = json.loads(node.annotations[KEYS.applied])
    content.pop("owner")
    unnamed = json.dumps(sealed(unsealed(_resealed(content, "n"), "n", "any"), "n"))
    older = replace(node, annotations={**node.annotations, KEYS.applied: unnamed})
    assert marks_of(older, other, T0).drained
    assert after(RELEASE, older, other, T0) == THEIRS


def _resealed(content: dict[str, object], node: str) -> dict[str, object]:
    plain = {name: value for name, value in content.items() if name != "seal"}
    return {**plain, "seal": digest_of(f"{node}\n{json.dumps(plain, sort_keys=True, separators=(',', ':'))}")}
