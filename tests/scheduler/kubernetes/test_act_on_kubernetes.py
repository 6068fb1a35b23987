"""`predrain act --scheduler kubernetes`, as an operator uses it."""

import shutil
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from foundation.kubernetes.client import KubernetesClient
from tests.policy.decide_world import STEP
from tests.processes import invoke
from tests.scheduler.kubernetes.api_world import World
from tests.scheduler.score_files import record, write

STATE = "/api/v1/namespaces/predrain/configmaps/predrain-state"
SETTINGS: dict[str, Any] = {
    "policy": {
        "thresholds": {"watch": 0.1, "elevated": 0.3, "high": 0.6},
        "hysteresis": {"rise_after": 1},
        "stages": {"pinned": {"kubernetes/none": "hard"}},
        # two nodes: one of them at risk is half of the fleet
        "breaker": {"max_risky": 1.0},
    },
    "controller": {"lease": "5s"},
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: KubernetesClient) -> Path:
    monkeypatch.chdir(tmp_path)
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{"name": "c", "cluster": {"server": cluster.host}}], "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    }  # fmt: skip
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    records = [record("gpu1", "n1", 0.9, now), record("gpu2", "n2", 0.01, now)]
    write(tmp_path / "scores", *records, at=now, model={"fitted_at": (now - timedelta(days=1)).isoformat()})
    settings(tmp_path)
    return tmp_path


def settings(place: Path, **kubernetes: Any) -> None:
    """Write the settings with a section kubernetes."""
    content = {**SETTINGS, "kubernetes": {"kubeconfig": "kubeconfig", **kubernetes}}
    (place / "act.yaml").write_text(yaml.safe_dump(content))


def act(*options: str, code: int = 0) -> Result:
    return invoke("act", "--scheduler=kubernetes", "--settings=act.yaml", *options, code=code)


@pytest.mark.usefixtures("place")
def test_it_rehearses_acts_stops_and_undoes(world: World) -> None:
    before = world.version
    assert "would    swap n1 (high)" in act("--scores=scores", "--dry-run").stdout
    assert world.version == before, "a rehearsal writes nothing"
    assert "done     swap n1 (high)" in act("--scores=scores").stdout
    assert {agent.split("/")[0] for agent in world.agents} == {"predrain-act"}
    act("--kill")
    assert world.objects[STATE]["metadata"]["annotations"] == {"predrain.io/kill": "true"}
    assert "done     release n1" in act("--release-all").stdout
    assert "taints" not in world.objects["/api/v1/nodes/n1"]["spec"]


def test_what_is_wrong_is_reported_and_never_stops_the_stopping(place: Path, world: World) -> None:
    assert "requires --scheduler file" in act("--scores=scores", "--cluster=x.json", code=2).output
    settings(place, namespce="x")
    assert (
        "settings.kubernetes.namespce: unknown key. Did you mean 'namespace'?" in act("--scores=scores", code=1).stderr
    )
    settings(place, diagnostic_job="none.yaml")
    assert "cannot read the manifest of the diagnostic" in act("--scores=scores", code=1).stderr
    assert "kill switch set" in act("--kill").stderr
    world.fail("GET", "configmaps", 403, content={"message": "configmaps is forbidden"})
    assert "the switches cannot be read: 127.0.0.1" in act("--kill", code=1).stderr
    settings(place, context="other")
    assert "no connection to the Kubernetes API server" in act("--kill", code=1).stderr


def break_everything(place: Path) -> None:
    """Damage all that is not the scheduler."""
    for file in place.glob("ledger.db*"):
        file.unlink()
    (place / "ledger.db").write_bytes(b"no ledger" * 1000)
    (place / "events.parquet").write_bytes(b"PAR1 no events")
    (place / "scores" / "latest.json").write_text("{")


def test_with_everything_broken_but_the_server_an_expired_mark_is_released(place: Path, world: World) -> None:
    end = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=5)
    at = end - 2 * STEP
    records = [record("gpu1", "n1", 0.9, at), record("gpu2", "n2", 0.01, at)]
    shutil.rmtree(place / "scores")
    write(place / "scores", *records, at=at, model={"fitted_at": (at - timedelta(days=1)).isoformat()})
    assert "done     swap n1 (high)" in act("--scores=scores").stdout
    break_everything(place)
    time.sleep(max(0.0, (end - datetime.now(UTC)).total_seconds()))
    released = act("--scores=scores", "--events=events.parquet", code=1)
    assert "done     release n1" in released.stdout
    assert all(f"error: the {what}" in released.stderr for what in ("ledger is damaged", "scores", "events"))
    assert "taints" not in world.objects["/api/v1/nodes/n1"]["spec"]
    assert "predrain.io" not in str(world.objects["/api/v1/nodes/n1"]["metadata"].get("annotations"))


def test_everything_is_released_with_everything_broken_but_the_server(place: Path, world: World) -> None:
    act("--scores=scores")
    break_everything(place)
    (place / "act.yaml").write_text("policy: [3]\nevacuation: off\nkubernetes: {kubeconfig: kubeconfig}\n")
    assert "done     release n1" in act("--release-all").stdout
    assert "taints" not in world.objects["/api/v1/nodes/n1"]["spec"]
    act("--resume")
    assert "kill switch set" in act("--kill").stderr
