"""``predrain init`` beside a dataset."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.params import load_params
from predrain.command import app
from tests.telemetry.helpers import run_import, samples_frame


@pytest.mark.parametrize("is_there", [True, False])
def test_the_parameters_have_the_step_of_the_dataset_and_its_counts_are_shown(tmp_path: Path, is_there: bool) -> None:
    if is_there:
        samples = samples_frame(every="30min")
        samples.loc[0, "gpu_temp_c"] = 1e9
        run_import(tmp_path, samples=samples, step=timedelta(minutes=30), out="fleet", max_loss=1.0)
    done = CliRunner().invoke(app, ["init", str(tmp_path / "model"), "--dataset", "../fleet", "--json"])
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    params = load_params([tmp_path / "model" / "predrain.yaml"])
    assert params.telemetry.step == (timedelta(minutes=30) if is_there else None)
    assert params.data.dataset == "../fleet"
    assert (shown.get("samples"), shown.get("quarantined")) == (
        (24, {"value out of range": 1}) if is_there else (None, None)
    )
