"""Fixtures: a fake server that runs, and a backfill that does not wait."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import stamina

from tests.telemetry.collect.prometheus.fake_prometheus import FakePrometheus, Site, serving


@pytest.fixture
def fake() -> Iterator[FakePrometheus]:
    made = FakePrometheus()
    with serving(made):
        yield made


@pytest.fixture(autouse=True)
def without_pauses() -> Iterator[None]:
    with stamina.set_testing(True, attempts=12):
        yield


@pytest.fixture
def site(fake: FakePrometheus, tmp_path: Path) -> Site:
    return Site(fake, tmp_path)
