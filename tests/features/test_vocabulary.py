"""Columns and their words."""

import math
import re
from datetime import timedelta

import pytest

from features.config import FeatureSection
from features.groups.static import StaticPlan
from features.matrix.plan import FeaturePlan
from features.vocabulary import COLUMNS, FeatureColumn, describe
from telemetry.dataset.channels import CATALOGUE, Channel
from tests.features.small_fleet import config_of

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


def every_column() -> tuple[FeatureColumn, ...]:
    channels = {**CATALOGUE, "odd_errors_total": Channel("odd_errors_total", "counter", "count", None, None, "")}
    static = [FeatureColumn.of("static", "model", "code", categories=("A100", "H100"))]
    static.append(FeatureColumn.of("static", "age", "days", unit="d"))
    static.append(FeatureColumn.of("static", "made_at", "days", unit="d"))
    static.append(FeatureColumn.of("static", "slot", "ordinal"))
    static.append(FeatureColumn.of("static", "bin_number", "value"))
    scopes = ("gpu", "slot", "node", ("cabinet", "cage"), "serial/1000", "fleet", "age")
    config = config_of(features=FeatureSection(history_scopes=scopes), channels=channels)
    return FeaturePlan.of(config, StaticPlan(tuple(static))).columns


@pytest.mark.parametrize("value", [math.nan, 0.0, 1.0, -0.25, 17_700.0])
def test_every_column_has_plain_words(value):
    for column in every_column():
        text = describe(column, value)
        assert not re.search(r"_|nan|None|  |\.$", text), (column.name, text)
        assert text == text.strip()


def test_every_column_survives_json_and_has_its_own_name():
    columns = every_column()
    assert len({column.name for column in columns}) == len(columns)
    assert COLUMNS.validate_json(COLUMNS.dump_json(columns)) == columns


SLOT_REPAIR = FeatureColumn.of("history", "repair", "since", scope="slot", unit="h")
MODEL = FeatureColumn.of("static", "model", "code", categories=("A100", "H100"))


@pytest.mark.parametrize(
    ("made", "value", "text"),
    [
        (
            FeatureColumn.of("telemetry", "ecc_sbe_volatile_total", "rise", window=6 * HOUR, unit="errors"),
            17_700.0,
            "correctable ECC errors (volatile) rose by 17,700 in the last 6 h",
        ),
        (
            FeatureColumn.of("telemetry", "gpu_temp_c", "delta", window=6 * HOUR, unit="C"),
            3.0,
            "GPU temperature averaged 3.0 °C higher over the last 6 h than over the 6 h before",
        ),
        (
            FeatureColumn.of("telemetry", "clocks_event_reasons_hw_thermal", "share", window=DAY),
            0.125,
            "hardware thermal slowdown was active in 12% of samples over the last 24 h",
        ),
        (
            FeatureColumn.of("history", "xid_memory", "count", window=7 * DAY, scope="node"),
            3.0,
            "3 memory XIDs on this node in the last 7 d",
        ),
        (SLOT_REPAIR, 0.5, "0.5 h since the last repair in this slot"),
        (SLOT_REPAIR, math.nan, "no earlier repair in this slot"),
        (
            FeatureColumn.of("peers", "gpu_temp_c", "node_deviation", window=6 * HOUR, unit="C"),
            7.25,
            "GPU temperature 7.2 °C above the median of the other GPUs of the node over the last 6 h",
        ),
        (
            FeatureColumn.of("onset", "pcie_replay_total", "surge", window=6 * HOUR),
            math.log(12),
            "PCIe replays in the last 6 h: "
            "at least 12.0 times its own baseline, above the 95th percentile of units of this model",
        ),
        (MODEL, 1.0, "model is H100"),
        (MODEL, 7.0, "model does not occur in the training data"),
    ],
)
def test_reasons_read_as_plain_words(made, value, text):
    assert describe(made, value) == text
