"""`predrain serve --model champion` and a real MLflow store: followed, kept when the store is gone, ended in order."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from models.bundle.store import Bundle, save_bundle
from models.registry.champion import set_champion
from models.registry.store import log_run, register_bundle
from tests.models.small_models import fitted_models
from tests.processes import serving
from tests.serving.http.world import Client
from tests.waiting import wait

pytestmark = pytest.mark.system
FACTS = {"params": {"labels": {"horizon": "24h"}}}


def ready(client: Client) -> Any:
    return client.send("GET", "/readyz")[1]


def bundle(folder: Path, profile: str) -> Bundle:
    return save_bundle(folder / profile, fitted_models(), {"profile": profile, **FACTS})


def test_the_champion_is_served_followed_and_kept(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    run = log_run(uri, "e", name="r", params={}, metrics={}, tags={})
    bundles = [bundle(tmp_path, profile) for profile in ("lightgbm", "logistic")]
    versions = [register_bundle(uri, "predrain", bundle.path, run_id=run) for bundle in bundles]
    options = ("--no-extender", "--model", "champion", "--registry", uri, "--champion-interval", "1s")
    with serving(tmp_path, *options) as (process, port):
        client = Client(port)
        wait(lambda: any("there is no champion" in reason for reason in ready(client).get("reasons", [])))
        set_champion(uri, "predrain", versions[0], expected=None, tags={})
        model = wait(lambda: ready(client).get("model"))
        assert model == {"digest": bundles[0].digest, "profile": "lightgbm", "version": str(versions[0])}
        set_champion(uri, "predrain", versions[1], expected=versions[0], tags={})
        wait(lambda: ready(client)["model"]["version"] == str(versions[1]))
        (tmp_path / "mlflow.db").rename(tmp_path / "away.db")
        wait(
            lambda: any(
                "cannot update the champion: the MLflow store does not exist" in warning
                for warning in ready(client)["warnings"]
            )
        )
        assert ready(client)["model"]["version"] == str(versions[1])
        client.connection.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    loaded = {
        f"loaded model {bundle.digest[:12]} ({bundle.profile}), version {version}"
        for bundle, version in zip(bundles, versions, strict=True)
    }
    assert loaded <= {line.get("message") for line in lines}
