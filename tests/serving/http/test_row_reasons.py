"""Feature rows are explained where that is asked for."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from models.bundle.store import Bundle, save_bundle
from models.explanation.members import attribute_score, members_of, weights_in
from tests.models.small_models import fitted_models, rows
from tests.serving.http.world import running, wait

FACTS = {"profile": "stacked", "params": {"labels": {"horizon": "24h"}}}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return save_bundle(tmp_path_factory.mktemp("bundle") / "bundle", fitted_models(), FACTS)


def body(X: np.ndarray) -> dict[str, Any]:
    names = [column.name for column in fitted_models().columns]
    times = ["2026-01-01T00:00:00Z", "2026-01-01T06:00:00Z"]
    return {
        "rows": [
            {"unit": f"g{at}", "decision_time": times[at % 2]}
            | {name: float(value) for name, value in zip(names, row, strict=True) if np.isfinite(value)}
            for at, row in enumerate(X)
        ]
    }


def test_rows_that_alert_are_explained_as_their_bundle_explains_them(tmp_path: Path, bundle: Bundle) -> None:
    X, _ = rows(40, seed=2)
    with running(tmp_path / "no", model=bundle.path, wait_for_scores=False) as service:
        wait(lambda: service.service.holder.model is not None)
        client = service.client()
        plain = client.post("/v1/predict", body(X))["predictions"]
        assert all("reasons" not in each for each in plain)
        told = client.post("/v1/predict?reasons=2", body(X))["predictions"]
        assert [{key: each[key] for key in plain[0]} for each in told] == plain
        alerted = [each for each in told if each["alert"]]
        assert alerted
        assert all(1 <= len(each["reasons"]) <= 2 for each in alerted)
        assert all(each["reasons"] == [] for each in told if not each["alert"])
        # The weightiest reason is of the group to which the bundle ascribes most.
        fitted = bundle.fitted
        values, _ = attribute_score(members_of(fitted, "stacked"), X, weights_in(fitted, "stacked"))
        groups = pd.DataFrame(values.clip(min=0).T).groupby([column.group for column in fitted.columns]).sum()
        for each in alerted:
            shares = groups[int(each["unit"][1:])]
            assert shares[each["reasons"][0]["group"]] > 0
            assert 0 < each["reasons"][0]["share"] <= 1
        for wrong in ("x", "11", "-1"):
            assert client.send("POST", f"/v1/predict?reasons={wrong}", body(X))[0] == 400
