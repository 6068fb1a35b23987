"""Parameters: merging, validation, and messages that say what, where and what to do."""

import doctest
from datetime import timedelta
from pathlib import Path

import pytest

from foundation.errors import InputError
from pipeline import params as module
from pipeline.params import Params, load_params

ROOT = Path(__file__).resolve().parents[2]


def write(tmp_path: Path, text: str, name: str = "p.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_differences_are_named_as_documented() -> None:
    assert doctest.testmod(module).failed == 0


def test_no_file_gives_the_defaults() -> None:
    assert load_params([]) == Params()


def test_the_shipped_file_is_valid_and_states_the_defaults_outside_the_demo_fleet() -> None:
    shipped = load_params([ROOT / "params.yaml"])
    labels = shipped.labels.model_copy(update={"classes": {}})  # the codes of the demo fleet's tickets
    assert shipped.model_copy(update={"simulate": Params().simulate, "labels": labels}) == Params()


def test_googles_prediction_is_a_channel_and_alone_a_baseline_of_its_own_horizon() -> None:
    shipped = ["params.yaml", "params/gke-health-prediction.yaml", "params/gke-health-prediction-alone.yaml"]
    channel, alone = (load_params([ROOT / name for name in shipped[:count]]) for count in (2, 3))
    assert set(channel.channels) == {"gke_health_prediction"}
    assert channel.model_copy(update={"channels": {}}) == load_params([ROOT / "params.yaml"])
    assert (alone.channels, alone.features.channels) == (channel.channels, ("gke_health_prediction",))
    assert alone.labels.horizon == timedelta(hours=5)


def test_later_files_override_key_by_key(tmp_path: Path) -> None:
    first = write(tmp_path, "labels: {gap: 20m, horizon: 12h}\ntraining: {candidate_windows: [7d, 14d]}", "a.yaml")
    second = write(tmp_path, "labels: {horizon: 48h}\ntraining: {candidate_windows: [30d]}", "b.yaml")
    params = load_params([first, second])
    assert params.labels.gap == timedelta(minutes=20)
    assert params.labels.horizon == timedelta(hours=48)
    assert params.training.candidate_windows == (timedelta(days=30),)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("labels: {horizonn: 24h}", r"unknown key .*parameter labels\.horizonn.*Did you mean 'horizon'\?"),
        ("channels: {volts: {kindd: gauge}}", r"unknown key .*channels\.volts\.kindd.*Did you mean 'kind'\?"),
        ("labels: {gap: 10}", r"10 is not a duration.*parameter labels\.gap"),
        ("training: {negative_ratio: 0}", r"greater than or equal to 1.*training\.negative_ratio"),
        ("decision: {origin: 2026-02-01T00:00:00}", r"no time zone"),
        ("features: {windows: [6h, 1h]}", r"ascending"),
        ("labels: {gap: '1:30:00'}", r"not a duration: write .* such as '90m'.*labels\.gap"),
        ("labels: {gap: 1h or so}", r"'1h or so' is not a duration.*labels\.gap"),
        ("telemetry: {step: 10m}\ndecision: {every: 25m}", r"25m is not a multiple.*10m.*decision\.every"),
        ("channels: {volts: {kind: gauge, range: [5, 1]}}", r"range \[5\.0, 1\.0\] is empty"),
        ("channels: {volts: {kind: number}}", r"value 'number'.*channels\.volts\.kind"),
        ("models: {groups: {lightgbm: [onsett]}}", r"value 'onsett'.*Did you mean 'onset'\?"),
        ("models: {groups: {lstm: [onset]}}", r"lstm reads raw windows"),
        ("training: {window: 0s}", r"must be positive.*training\.window"),
        ("labels: {horizon: 0s}", r"must be positive.*labels\.horizon"),
        ("telemetry: {step: 0s}", r"must be positive.*telemetry\.step"),
        ("decision: {every: 0s}", r"must be positive.*decision\.every"),
        ("features: {groups: []}", r"empty list.*features\.groups"),
        ("seed: -1", r"greater than or equal to 0.*parameter seed"),
        ("[1, 2]", r"a list instead of sections"),
        ("labels: {gap: [", r"not valid YAML"),
        ("seed: 1\nk: 2\nseed: 3", r"(?s)'seed' is duplicated in one mapping: first.*line 1.*and again.*line 3"),
        ("models: {parallel: {members: [mlp, mlp, logistic]}}", r"mlp twice.*parameter models\.parallel\.members"),
    ],
)
def test_bad_values_say_what_where_and_what_to_do(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError, match=expected) as caught:
        load_params([path])
    assert str(path) in str(caught.value)


def test_durations_are_read_as_people_write_them_and_a_folder_stands_for_its_params_yaml(tmp_path: Path) -> None:
    write(tmp_path, "labels: {gap: 30min, horizon: 1d 12h, cooldown: 1h30m}", "params.yaml")
    labels = load_params([tmp_path]).labels
    assert (labels.gap, labels.horizon, labels.cooldown) == tuple(timedelta(hours=hours) for hours in (0.5, 36, 1.5))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the parameter file does not exist.*absent\.yaml"):
        load_params([tmp_path / "absent.yaml"])
