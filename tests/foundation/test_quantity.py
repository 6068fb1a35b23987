"""Quantities of Kubernetes resources."""

from decimal import Decimal

import pytest

from foundation.kubernetes.api import parse_quantity


@pytest.mark.parametrize(
    ("value", "amount"),
    [
        ("2", 2), (8, 8), ("0.5", Decimal("0.5")), ("500m", Decimal("0.5")), (".5", Decimal("0.5")), ("1.", 1),
        ("2k", 2000), ("8Ki", 8192), ("8Gi", 8 * 1024**3), ("1e3", 1000), ("1E2", 100), ("2E", 2 * 10**18),
        ("100n", Decimal("1e-7")), (" 4 ", 4),
    ],
)  # fmt: skip
def test_a_quantity_is_read_in_base_units(value: object, amount: object) -> None:
    assert parse_quantity(value) == amount


@pytest.mark.parametrize("value", ["", "many", "-1", "1 Gi", "8gib", "1e999", "9" * 1000, None, True])
def test_what_is_no_quantity_is_none(value: object) -> None:
    assert parse_quantity(value) is None
