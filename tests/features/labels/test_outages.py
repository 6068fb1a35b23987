"""Units known to be out of use have no rows: down, or drained by someone else and not given back."""

from itertools import pairwise

import pandas as pd
from hypothesis import given, settings

from features.config import LabelSection
from features.labels.evidence import IncidentEvidence
from features.labels.incidents import LONGEST_DRAIN, down_intervals, out_of_use
from tests.features import oracle
from tests.features.builders import at, event, events, inventory, stay
from tests.features.worlds import twins, worlds

LABELS = LabelSection()


def spans(*happened, stays=None):
    intervals = oracle.records(out_of_use(IncidentEvidence.of(events(*happened), stays or inventory(stay()), LABELS)))
    return [(row["down_from"], row["down_until"]) for row in intervals]


def test_a_drain_holds_until_it_is_taken_back():
    drained = event(at(1), "drain", "unhealthy", source="scheduler", known=at(1))
    assert spans(drained, event(at(9), "drain", "released", source="scheduler", known=at(9))) == [(at(1), at(9))]
    assert spans(drained, event(at(9), "repair", known=at(10))) == [(at(1), at(10))]


def test_a_drain_of_the_node_takes_out_its_gpus():
    node = event(at(1), "drain", "planned", gpu=None, source="scheduler", known=at(1))
    assert spans(node, event(at(5), "drain", "released", gpu=None, source="scheduler", known=at(5))) == [(at(1), at(5))]


def test_a_drain_that_is_never_taken_back_ends_all_the_same():
    intervals = spans(event(at(1), "drain", "unhealthy", source="scheduler", known=at(1)))
    assert intervals == [(at(1), at(1) + LONGEST_DRAIN)]


def test_our_own_drain_leaves_the_unit_watched():
    assert spans(event(at(1), "drain", "at-risk", source="predrain", known=at(1))) == []


def test_a_drain_after_a_failure_goes_on_where_the_quiet_span_ends():
    intervals = spans(
        event(at(0), code="79", known=at(0)),
        event(at(1), "drain", "unhealthy", source="scheduler", known=at(1)),
        event(at(100), "repair", known=at(100)),
    )
    assert intervals == [(at(0), at(100))]


@settings(max_examples=40, deadline=None)
@given(worlds())
def test_intervals_are_disjoint_and_hold_every_known_incident(world):
    both = oracle.records(out_of_use(IncidentEvidence.of(world.events, world.inventory, LABELS)))
    for one, two in pairwise(both):
        assert one["unit"] != two["unit"] or one["down_until"] < two["down_from"]
    for row in oracle.records(down_intervals(IncidentEvidence.of(world.events, world.inventory, LABELS))):
        assert any(
            outage["unit"] == row["unit"]
            and outage["down_from"] <= row["down_from"]
            and row["down_until"] <= outage["down_until"]
            for outage in both
        )


@settings(max_examples=40, deadline=None)
@given(twins())
def test_what_is_not_known_at_r_changes_nothing_at_or_before_r(pair):
    views = [out_of_use(IncidentEvidence.of(world.events, world.inventory, LABELS)) for world in pair]
    r = pair[0].r
    cut = [
        view[view["down_from"] <= r].assign(
            down_until=lambda v: v["down_until"].where(v["down_until"] <= r, pd.Timestamp(r))
        )
        for view in views
    ]
    pd.testing.assert_frame_equal(cut[0].reset_index(drop=True), cut[1].reset_index(drop=True))
