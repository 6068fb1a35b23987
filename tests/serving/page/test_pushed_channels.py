"""A GPU's page shows what was pushed to the service: without a dataset, and where the dataset ends earlier."""

import json
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from serving.online.unit_series import unit_series
from tests.features.small_fleet import HOUR
from tests.serving.batch_world import SILENT, World, make_world, telemetry
from tests.serving.http.test_telemetry_route import END, Clock, cut, late_samples, rows_of, serving
from tests.serving.page.page_world import look


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("pushed"))


def test_the_plots_are_of_what_was_pushed(tmp_path: Path, world: World) -> None:
    samples, border = late_samples(world)
    with serving(tmp_path, world, Clock(END), dataset=cut(world, tmp_path / "cut", border)) as service:
        page = look(service, "/gpus/gpu01")
        assert "as pushed to the service" in page.text
        before = [
            str(found["aria-label"]) for tag, found in page.tags if tag == "svg" and found.get("class") == "small"
        ]
        service.client().post("/v1/telemetry", {"samples": rows_of(samples)})
        page = look(service, "/gpus/gpu01")
        plots = [str(found["aria-label"]) for tag, found in page.tags if tag == "svg" and found.get("class") == "small"]
        assert plots != before
        state = service.service.online.upkeep.state  # type: ignore[union-attr]
        told = unit_series(state, "node0", "gpu01")
        assert told is not None
        frame = telemetry(world.dataset.inventory())
        # It holds no more than the model looks back on.
        mine = frame[(frame["gpu"] == "gpu01") & (frame["timestamp"] > END - state.look_back)].sort_values("timestamp")
        assert json.loads(json.dumps(told, allow_nan=False)) == told
        assert told["end"] == mine["timestamp"].iloc[-1].isoformat()
        for each in [*told["series"], *told["constant"]]:
            high = world.matrix.config.channels[each["name"]].high
            values = mine[each["name"]].dropna().to_numpy(float)
            values = values if high is None else values[values <= high]  # others cannot be true, and are not held
            assert each["last"] == pytest.approx(values[-1], rel=1e-5)
            if each["kind"] == "gauge":
                assert np.nanmax(np.array(each["max"], dtype=float)) == pytest.approx(values.max(), rel=1e-5)
        assert told["series"]
        assert unit_series(state, "node9", "gpu01") is None
        assert "nor telemetry of this GPU, so channels cannot be shown" in look(service, f"/gpus/{SILENT}").text


def test_samples_that_wait_for_their_step_are_shown_too(tmp_path: Path, world: World) -> None:
    clock = Clock(END)
    with serving(tmp_path, world, clock) as service:
        clock.now = END + HOUR
        at = (END + HOUR - timedelta(minutes=1)).isoformat()
        channel = next(each.name for each in world.matrix.config.channels.values() if each.kind == "gauge")
        row = {"timestamp": at, "node": "node0", "gpu": "gpu01", channel: 61.5}
        assert service.client().post("/v1/telemetry", {"samples": [row]})["samples"]["stored"] == 1
        told = unit_series(service.service.online.upkeep.state, "node0", "gpu01")  # type: ignore[union-attr]
        assert told is not None
        assert told["end"] == at
        assert next(each["last"] for each in told["series"] if each["name"] == channel) == 61.5
