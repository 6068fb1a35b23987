"""History features: counts, ages and weights of what was known, for the device, its slot and its node."""

import math
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from features.config import FeatureSection, LabelSection
from features.groups.domains import check_scopes
from features.groups.history import EventHistory, history_columns
from features.labels.evidence import IncidentEvidence
from foundation.errors import InputError
from tests.features import oracle
from tests.features.builders import at, event, events, installation, inventory, rows
from tests.features.history_oracle import facts_of, plain_value
from tests.features.worlds import twins, worlds

LABELS = LabelSection()
FEATURES = FeatureSection(history_windows=(timedelta(hours=12), timedelta(days=3)))
DOMAINS = FEATURES.model_copy(
    update={"history_scopes": ("gpu", "slot", "node", ("node", "slot"), "gpu/2", "fleet", "age")}
)
SLOW = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
UNITS = {"g0": "n0", "g1": "n0", "g2": "n1", "g3": "n0"}


def history_values(rows, events, inventory, features, labels, *, unit="gpu"):
    return EventHistory.of(IncidentEvidence.of(events, inventory, labels), features, inventory, unit=unit).values(rows)


def value(name, time, *happened, installations=None, unit="g0", node="n0", labels=LABELS):
    """One value of one row, by the name of its column without the group."""
    gpus = inventory(*(installations or [installation(), installation("g1", slot="1")]))
    values = history_values(rows((time, unit), node=node), events(*happened), gpus, FEATURES, labels)
    names = [column.name for column in history_columns(FEATURES)]
    assert values.shape == (1, len(names))
    return float(values[0, names.index(f"history__{name}")])


@pytest.mark.parametrize(
    ("code", "group"),
    [("48", "memory"), ("79", "bus"), ("119", "firmware"), ("74", "interconnect"), ("150", "interconnect"),
     ("63", "precursor"), ("46", "watch"), ("158", "watch"), ("99999", "watch"), ("31", "app")],
)  # fmt: skip
def test_each_xid_is_in_one_group(code, group):
    groups = ("memory", "bus", "firmware", "interconnect", "precursor", "watch", "app")
    counting = [g for g in groups if value(f"gpu_xid_{g}__count__12h", at(1), event(at(0), code=code))]
    assert counting == [group]
    hardware = value("gpu_xid_hardware__since", at(1), event(at(0), code=code))
    assert math.isnan(hardware) == (group == "app")


def test_params_move_an_xid_to_the_group_of_its_class():
    labels = LabelSection(xids={"firmware": (46, 43)})
    assert value("gpu_xid_firmware__count__12h", at(1), event(at(0), code="43"), labels=labels) == 1
    assert value("gpu_incident__count__12h", at(1), event(at(0), code="43"), labels=labels) == 1


def test_no_events_no_units_and_no_rows():
    gpus = inventory(installation())
    assert history_values(rows(), events(), gpus, FEATURES, LABELS).shape == (0, len(history_columns(FEATURES)))
    values = history_values(rows((at(0), "gX"), node="nX"), events(event(at(-1), code="79")), gpus, FEATURES, LABELS)
    assert set(np.unique(values[~np.isnan(values)])) == {0}


def test_nodes_without_gpus_have_the_history_of_the_node():
    gpus = inventory(installation(None, "n0", None))
    frame = events(event(at(0), "failure", "fan", gpu=None), event(at(2), "repair", gpu=None))
    decisions = rows((at(5), "n0"))
    values = history_values(decisions, frame, gpus, FEATURES, LABELS, unit="node")
    names = [column.name for column in history_columns(FEATURES, unit="node")]
    assert values[0, names.index("history__node_incident__since")] == 5
    assert values[0, names.index("history__node_failure__count__12h")] == 1
    assert values[0, names.index("history__node_repair__since")] == 3


def test_a_domain_is_read_from_inventory_columns_and_ranges_of_a_number():
    section = FeatureSection(history_windows=(timedelta(days=4),), history_scopes=("rack", "serial/100"))
    gpus = inventory(
        installation("g0", "n0", rack="r1", serial="A0199"),
        installation("g1", "n1", rack="r1", serial="A0205"),
        installation("g2", "n2", rack="r2", serial="A0201"),
        installation("g3", "n3", rack=None, serial="odd"),
    )
    happened = events(event(at(0), code="79", gpu="g1", node="n1"))
    values = history_values(rows(*((at(days=2), f"g{i}") for i in range(4))), happened, gpus, section, LABELS)
    names = [column.name for column in history_columns(section)]
    rate, by_serial = (values[:, names.index(f"history__{name}_incident__rate__4d")] for name in ("rack", "serial_100"))
    np.testing.assert_allclose(rate, [1000 / 8, 1000 / 8, 0, np.nan])  # one of two units in four days each
    np.testing.assert_allclose(by_serial, [0, 1000 / 8, 1000 / 8, np.nan])
    with pytest.raises(InputError, match=r"'pod' is not a column of the inventory .*fleet, age, gpu, node, rack"):
        check_scopes([("rack", "pod")], gpus)


@SLOW
@given(worlds(most=20))
def test_values_are_as_the_plain_reading_says(world):
    decisions = rows(*((at(11.25 * k), unit) for k in range(0, 16) for unit in UNITS))
    decisions["node"] = decisions["unit"].map(UNITS).astype("str")
    values = history_values(decisions, world.events, world.inventory, DOMAINS, LABELS)
    columns, facts = history_columns(DOMAINS), facts_of(world.events, world.inventory, LABELS)
    gpus = oracle.records(world.inventory)
    sampled = np.random.default_rng(0).permutation(len(decisions))[:12]
    for i in sampled:
        row = decisions.iloc[i]
        for j, column in enumerate(columns):
            expected = plain_value(column, row["decision_time"], row["unit"], row["node"], facts, gpus)
            np.testing.assert_allclose(values[i, j], expected, rtol=1e-6, atol=1e-9, err_msg=column.name)


@SLOW
@given(twins(most=20), st.integers(0, 10))
def test_a_poisoned_future_leaves_every_value_bit_identical(pair, hours_ago):
    r = pair[0].r
    decisions = rows(*((r - timedelta(hours=h), unit) for h in (0, hours_ago, 30) for unit in UNITS))
    decisions["node"] = decisions["unit"].map(UNITS).astype("str")
    one, two = (history_values(decisions, w.events, w.inventory, DOMAINS, LABELS) for w in pair)
    np.testing.assert_array_equal(one.view(np.uint32), two.view(np.uint32))


@SLOW
@given(worlds(most=20), st.randoms(use_true_random=False))
def test_a_row_alone_equals_the_row_among_others_in_any_order(world, random):
    pairs = [(at(7 * k), unit) for k in range(20) for unit in UNITS]
    random.shuffle(pairs)
    decisions = rows(*pairs)
    decisions["node"] = decisions["unit"].map(UNITS).astype("str")
    history = EventHistory.of(IncidentEvidence.of(world.events, world.inventory, LABELS), DOMAINS, world.inventory)
    together = history.values(decisions)
    for i in (0, 17, 42):
        alone = history.values(decisions.iloc[[i]])
        np.testing.assert_array_equal(alone.view(np.uint32), together[[i]].view(np.uint32))
