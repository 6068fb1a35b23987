"""A channel that the model was trained on and that stops arriving opens the breaker, from the batch to the decision."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from features.times import instant_ms
from models.config import ServingSection
from models.training.reference import Outcomes, Reference, summarise
from policy.breaker import BreakerConfig, BreakerState, watch
from policy.fleet import Signals
from scheduler.controller.scores_reader import ScoresReader
from serving.scores.batch import ServedModel, score_decision
from serving.scores.writing import ScoresFolder
from telemetry.dataset.store import Dataset
from tests.features.small_fleet import HOUR, T0, events_of, gpus, inventory_of, write_dataset
from tests.serving.batch_world import HOURS, World, make_world, telemetry

END = T0 + HOURS * HOUR


class StoppedClock:
    def now(self):
        return END

    def monotonic(self):
        return 0.0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def with_reference(world: World) -> ServedModel:
    values, columns = world.matrix.values(), tuple(world.matrix.columns)
    features = tuple(summarise(values[:, index]) for index in range(len(columns)))
    reference = Reference(instant_ms(T0), instant_ms(END), columns, features, 12.0, 8.0, Outcomes(len(values), {}))
    return ServedModel(replace(world.bundle, fitted=replace(world.bundle.fitted, reference=reference)))


def without(channel: str, share: float, folder: Path) -> Dataset:
    """The fleet's telemetry, in which a share of the GPUs send no value of the channel in the last twelve hours."""
    inventory = inventory_of(gpus(12))
    samples = telemetry(inventory)
    names = sorted(samples["gpu"].unique())
    silent = names[: round(share * len(names))]
    lost = (samples["timestamp"] > T0 + (HOURS - 12) * HOUR) & samples["gpu"].isin(silent)
    samples[channel] = samples[channel].mask(lost)
    return write_dataset(folder, inventory, samples=samples, events=events_of([]), hours=HOURS)


@pytest.mark.parametrize(("share", "missing"), [(0.0, ()), (0.3, ()), (1.0, ("power_w",))])
def test_a_channel_that_most_of_the_fleet_stops_sending_opens_the_breaker(
    world: World, share: float, missing: tuple[str, ...], tmp_path: Path
) -> None:
    dataset, scores = without("power_w", share, tmp_path / "data"), ScoresFolder(tmp_path / "scores")
    score_decision(dataset, with_reference(world), scores, ServingSection(), clock=lambda: END)
    risks = ScoresReader(tmp_path / "scores", StoppedClock(), timedelta(days=2)).read()
    assert risks.missing_channels == missing
    signals = Signals(read_at=END, model_fitted_at=END, missing_channels=risks.missing_channels)
    state, _ = watch(BreakerState(), [], signals, None, BreakerConfig(), END)
    assert set(state.causes) == {f"channel {name}" for name in missing}
