"""Static features: what is known of a unit at the decision."""

from datetime import timedelta

import numpy as np
import pandas as pd
import pytest

from features.fleet import Fleet
from features.groups.static import StaticPlan
from foundation.errors import InputError
from tests.features.small_fleet import HOUR, T0, events_of, gpus, inventory_of, stamps

DAY = timedelta(days=1)


def values(inventory, events, names, queries):
    plan = StaticPlan.of(inventory, events, names)
    fleet = Fleet.of(inventory)
    pair = fleet.numbers([node for node, _, _ in queries], [gpu for _, gpu, _ in queries])
    time = pd.DatetimeIndex(stamps([at for *_, at in queries])).astype("int64").to_numpy()
    array = plan.of_fleet(fleet, inventory, events).values(pair, time)
    return plan, pd.DataFrame(array, columns=[str(column.channel) for column in plan.columns])


def driver(hours, version, *, node="node0", gpu=None, known=None):
    time = T0 + hours * HOUR
    row = {"timestamp": time, "node": node, "gpu": gpu, "type": "driver", "code": version}
    return row | ({"known_at": T0 + known * HOUR} if known is not None else {})


def test_codes_number_values_in_the_order_they_were_known():
    inventory = inventory_of(gpus(6))
    plan, frame = values(inventory, events_of([]), "auto", [("node0", "gpu00", T0), ("node0", "gpu01", T0)])
    model = {str(column.channel): column for column in plan.columns}["model"]
    assert model.categories == ("A100", "H100")  # gpu05, the oldest, is an A100
    assert frame["model"].tolist() == [1.0, 0.0]
    later = pd.concat(
        [inventory, inventory_of([{**gpus(1)[0], "gpu": "new", "model": "A000", "installed_at": T0 + DAY}])]
    )
    again = {str(column.channel): column for column in StaticPlan.of(later, events_of([]), "auto").columns}["model"]
    assert again.categories == ("A100", "H100", "A000")


def test_the_driver_follows_what_was_known_at_the_decision():
    events = events_of(
        [
            driver(-2000, "470"),  # before the installation: the inventory's driver is newer
            driver(1, "550"),
            driver(4, "560", gpu="gpu01"),
            driver(3, "555", known=6),  # entered late, and older than what gpu01 already has
        ]
    )
    queries = [("node0", gpu, T0 + h * HOUR) for gpu in ("gpu00", "gpu01") for h in (0, 1, 2, 5, 7)]
    plan, frame = values(inventory_of(gpus(2)), events, ("driver",), queries)
    names = [plan.columns[0].categories[int(code)] for code in frame["driver"]]
    assert names == ["535.1", "535.1", "550", "550", "555", "535.1", "535.1", "550", "560", "560"]


def test_age_counts_from_the_first_installation_anywhere():
    rows = gpus(1)
    rows[0]["removed_at"] = T0 + DAY
    rows.append({**rows[0], "node": "node7", "installed_at": T0 + 2 * DAY, "removed_at": None})
    _, frame = values(
        inventory_of(rows), events_of([]), ("age", "slot"), [("node0", "gpu00", T0), ("node7", "gpu00", T0 + 3 * DAY)]
    )
    assert frame["age"].tolist() == [10.0, 13.0]
    assert frame["slot"].tolist() == [0.0, 0.0]


def test_a_move_begins_the_time_in_a_place_and_is_counted_from_then_on():
    rows = gpus(2)
    rows[0]["removed_at"] = T0 + DAY
    rows += [{**rows[0], "node": f"node{n}", "installed_at": T0 + n * DAY, "removed_at": None} for n in (7, 9)]
    rows[2]["removed_at"] = T0 + 8 * DAY
    queries = [("node0", "gpu00", T0), ("node7", "gpu00", T0 + 7 * DAY), ("node9", "gpu00", T0 + 12 * DAY)]
    queries += [("node0", "gpu01", T0 + 12 * DAY)]
    _, frame = values(inventory_of(rows), events_of([]), ("in_place", "moves"), queries)
    assert frame["in_place"].tolist() == [10.0, 0.0, 3.0, 23.0]
    assert frame["moves"].tolist() == [0.0, 1.0, 2.0, 0.0]


def test_named_columns_are_taken_by_their_type():
    rows = gpus(2)
    for row, bin_number, vendor, built_at in zip(rows, (3, 7), ("x", None), (T0 - 5 * DAY, T0 + DAY), strict=True):
        row |= {"bin": bin_number, "vendor": vendor, "made": built_at}
    inventory = inventory_of(rows)
    inventory["made"] = stamps(inventory["made"])
    queries = [("node0", "gpu00", T0), ("node0", "gpu01", T0), ("node0", "nobody", T0)]
    _, frame = values(inventory, events_of([]), ("bin", "vendor", "made"), queries)
    np.testing.assert_array_equal(frame["bin"], [3, 7, np.nan])
    np.testing.assert_array_equal(frame["vendor"], [0, np.nan, np.nan])
    np.testing.assert_array_equal(frame["made"], [5, np.nan, np.nan])  # not yet made


def test_an_unfilled_column_is_left_out_of_auto():
    rows = [{key: value for key, value in row.items() if key != "rack"} | {"model": None} for row in gpus(2)]
    names = [column.channel for column in StaticPlan.of(inventory_of(rows), events_of([]), "auto").columns]
    assert names == ["driver", "age", "slot"]


def test_all_takes_every_column_but_those_that_name_the_unit():
    rows = [
        row | {"serial": f"S{i}", "label": f"tag {i}", "batch": i % 2, "maker": "A"} for i, row in enumerate(gpus(20))
    ]
    columns = StaticPlan.of(inventory_of([row | {"age": 3} for row in rows]), events_of([]), "all").columns
    names = {column.channel for column in columns}
    assert len(names) == len(columns), "an inventory's own age is not a second one"
    assert {"age", "in_place", "moves", "slot", "batch", "maker"} <= names
    assert not names & {"gpu", "serial", "node", "label", "installed_at", "removed_at"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("removed_at", r"'removed_at' cannot be a feature \(parameter features\.static\)"),
        ("installed_at", "'installed_at' cannot be a feature .*Name 'in_place' instead"),
        ("colour", "no column 'colour' .*Choose among: age, driver, gpu, in_place, model, moves, node, rack, slot"),
    ],
)
def test_a_wrong_name_is_explained(name, message):
    with pytest.raises(InputError, match=message):
        StaticPlan.of(inventory_of(gpus(2)), events_of([]), (name,))
