"""Fixtures: a fake server that runs, and a backfill that does not wait."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import stamina

from foundation.http import connect_to
from telemetry.collect.prometheus.backfill import BackfillPlan, backfill
from telemetry.collect.prometheus.client import Bounds
from telemetry.dataset.channels import CATALOGUE
from tests.telemetry.collect.prometheus.fake_prometheus import START, FakePrometheus, serving

PATIENT = Bounds(request_s=60.0, first_retry_for_s=60.0)
"""No test depends on the speed of the machine; tests of silence bring bounds of their own."""


@pytest.fixture
def fake() -> Iterator[FakePrometheus]:
    made = FakePrometheus()
    with serving(made):
        yield made


@pytest.fixture(autouse=True)
def without_pauses() -> Iterator[None]:
    with stamina.set_testing(True, attempts=12):
        yield


Fetch = Callable[..., dict[str, Any]]


@pytest.fixture
def fetch(fake: FakePrometheus, tmp_path: Path) -> Fetch:
    """Backfill six hours from the fake server into ``tmp_path/fleet.live``; keywords change the plan."""

    def run(**changes: object) -> dict[str, Any]:
        connection = changes.pop("connection", None) or connect_to(fake.url)
        bounds = changes.pop("bounds", PATIENT)
        mapping = changes.pop("mapping", None)
        accounting = changes.pop("accounting", None)
        now = changes.pop("now", START + timedelta(days=300))
        plan = replace(BackfillPlan(START, START + timedelta(hours=6), chunk=timedelta(hours=1)), **changes)
        return backfill(
            connection,
            plan,
            tmp_path / "fleet.live",
            channels=CATALOGUE,
            mapping=mapping,
            clock=lambda: now,
            bounds=bounds,
            accounting=accounting,
        )

    return run
