"""A registered bundle behind MLflow's own server: it answers the bundle's risks, and refuses what it cannot score."""

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from features.matrix.matrix import FeatureMatrix
from models.bundle.store import load_bundle
from pipeline.matrix_stage import make_matrix
from pipeline.params import Params
from tests.waiting import free_port, wait

BIN = Path(sys.executable).parent
ANSWER_WITHIN_S = 120.0
pytestmark = pytest.mark.system


@dataclass(frozen=True)
class Served:
    """A running server, and rows of the last decision time beside what the bundle itself says of them."""

    port: int
    frame: pd.DataFrame
    expected: pd.DataFrame

    def ask(self, body: bytes | dict[str, Any], content: str = "application/json") -> tuple[int, str]:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        return self.send("POST", "/invocations", data, content)

    def send(self, method: str, path: str, body: bytes = b"", content: str = "text/plain") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_WITHIN_S)
        try:
            connection.request(method, path, body, {"Content-Type": content})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def split(self, **changed: Any) -> dict[str, Any]:
        """The rows as MLflow's ``dataframe_split``, columns replaced."""
        frame = self.frame.assign(**changed)
        values = frame.astype(object).where(frame.notna(), None)
        return {"dataframe_split": {"columns": list(frame.columns), "data": values.to_numpy().tolist()}}


@contextmanager
def mlflow_serve(store: str, folder: Path, port: int) -> Iterator[None]:
    """Run ``mlflow models serve`` on the challenger until the block ends; it and its children are ended with it."""
    env = os.environ | {
        "PATH": f"{BIN}:{os.environ['PATH']}",  # it starts its web server by name
        "MLFLOW_TRACKING_URI": store,
        "MLFLOW_REGISTRY_URI": store,  # MLflow itself sets it for the process that asked a registry
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    log = folder / "serve.log"
    command = [BIN / "mlflow", "models", "serve", "-m", "models:/predrain@challenger", "--env-manager", "local"]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=folder,
            env=env,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        wait(lambda: process.poll() is not None or answers_ping(port))
        assert process.poll() is None, log.read_text()[-3000:]
        yield
    finally:
        for kind, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
            try:
                os.killpg(process.pid, kind)
                process.wait(patience)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue


def answers_ping(port: int) -> bool:
    try:
        return Served(port, pd.DataFrame(), pd.DataFrame()).send("GET", "/ping")[0] == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, small_params: Params, small_params_file: Path) -> Iterator[Served]:
    """A bundle of a simulated fleet, trained and registered by ``predrain train --registry``, behind ``mlflow``."""
    from simulator.simulate import simulate

    folder = tmp_path_factory.mktemp("mlflow-serve")
    simulate(folder / "fleet", gpus=32, days=40, seed=131, scenario="base", acceleration=100.0)
    make_matrix(folder / "fleet", small_params, folder / "matrix")
    store = f"sqlite:///{folder / 'mlflow.db'}"
    command = [BIN / "predrain", "train", "--matrix", "matrix", "--out", "bundle"]
    trained = subprocess.run(
        [*command, "--registry", store, "--params", small_params_file, "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout)["challenger"] == "predrain version 1"

    matrix, bundle = FeatureMatrix.open(folder / "matrix"), load_bundle(folder / "bundle")
    rows = matrix.rows[~matrix.rows["augmented"]]
    newest = rows["decision_time"].max()
    at = rows.index[rows["decision_time"] == newest].to_numpy()
    values = matrix.values(at)
    units = rows.loc[at, "unit"].to_numpy()
    scored = bundle.fitted.score(values, pd.Series([newest] * len(at)), units)
    frame = pd.DataFrame(values.astype(float), columns=[column.name for column in bundle.fitted.columns])
    frame.insert(0, "unit", units)
    port = free_port()
    with mlflow_serve(store, folder, port):
        yield Served(port, frame, scored[scored["model"] == bundle.profile].reset_index(drop=True))


def predictions_of(answer: tuple[int, str]) -> pd.DataFrame:
    status, body = answer
    assert status == 200, body[:2000]
    return pd.DataFrame(json.loads(body)["predictions"])


def close(answered: pd.Series, expected: pd.Series) -> None:
    """A linear member's sums depend on how its rows lie in memory: the float32 scores may differ in their last bit."""
    np.testing.assert_allclose(answered, expected.astype(float), rtol=2e-6)


def check(answered: pd.DataFrame, expected: pd.DataFrame) -> None:
    assert list(answered["unit"]) == list(expected["unit"])
    close(answered["risk"], expected["risk"])
    close(answered["score"], expected["score"])
    np.testing.assert_array_equal(answered["rank"], expected["rank"])
    np.testing.assert_array_equal(answered["alert"], expected["alert"])


def test_the_server_answers_the_risks_of_the_bundle_in_every_form_it_takes(served: Served) -> None:
    assert served.send("GET", "/ping")[0] == 200
    assert served.frame.isna().to_numpy().any()  # unknown features go as null
    answered = predictions_of(served.ask(served.split()))
    assert answered["risk"].between(0, 1).all()
    assert answered["risk"].nunique() > 3
    check(answered, served.expected)
    records = served.frame.astype(object).where(served.frame.notna(), None).to_dict("records")
    check(predictions_of(served.ask({"dataframe_records": records})), served.expected)
    csv = served.frame.to_csv(index=False).encode()
    check(predictions_of(served.ask(csv, "text/csv")), served.expected)
    check(predictions_of(served.ask(served.split(decision_time="2026-02-09T18:00:00Z"))), served.expected)


def test_what_cannot_be_scored_is_refused_and_the_server_goes_on(served: Served) -> None:
    feature = served.frame.columns[1]
    bad: dict[str, tuple[dict[str, Any] | bytes, str]] = {
        "no features": ({"dataframe_split": {"columns": ["unit"], "data": [["g1"]]}}, "missing inputs"),
        "text for a number": (served.split(**{feature: "hot"}), feature),
        "too large": (served.split(**{feature: 1e300}), "Give a finite number, or null where it"),
        "no unit": (served.split(unit=None), "row 0 has no unit. Give the GPU"),
        "no time": (served.split(decision_time="soon"), "row 0 is 'soon', which is not a time"),
    }
    for name, (body, message) in bad.items():
        status, answer = served.ask(body)
        assert 400 <= status < 500, (name, status, answer[:500])
        assert message in answer, (name, answer[:2000])
    check(predictions_of(served.ask(served.split())), served.expected)
