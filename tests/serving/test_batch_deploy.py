"""The shipped systemd units and the CronJob name a command that is one, and hold no more rights than they need."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from predrain import score
from telemetry.config import parse_duration
from tests.policy.test_risk_record import KNOWN

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "deploy" / "systemd"
APP = typer.Typer()
APP.command("score")(score.score)


class _Many(dict[str, Any]):
    """Keeps a key that a unit file gives several times."""

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, list) and key in self and isinstance(self[key], list):
            value = [*self[key], *value]
        super().__setitem__(key, value)


def unit(name: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, dict_type=_Many, comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNITS / name)
    return parser


def options() -> set[str]:
    return {option for parameter in typer.main.get_command(APP).params for option in parameter.opts}


def used(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def test_the_service_runs_the_verb_with_options_that_it_has() -> None:
    service = unit("predrain-score.service")["Service"]
    words = shlex.split(service["ExecStart"])
    assert words[:3] == ["/usr/bin/env", "predrain", "score"]
    assert {"--dataset", "--model", "--out"} <= used(words) <= options()
    text = (UNITS / "predrain-score.service").read_text()
    defaults = dict(re.findall(r"Environment=(PREDRAIN_\w+|MLFLOW_\w+)=(.*)", text))
    for name in re.findall(r"\$\{?(PREDRAIN_\w+)", service["ExecStart"]):
        assert name in defaults
    assert service["Type"] == "oneshot"  # so that a failed run is a failed unit
    assert service["ProtectSystem"] == "strict"
    assert service["User"] == "predrain"
    assert service["CapabilityBoundingSet"] == ""
    assert "NUMBA_CACHE_DIR=%C/predrain/numba" in service["Environment"]  # where it may write


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    (found,) = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "score-cronjob.yaml").read_text())
    assert (found["apiVersion"], found["kind"]) == ("batch/v1", "CronJob")
    return dict(found["spec"])


def test_the_cron_job_never_overlaps_and_ends(job: dict[str, Any]) -> None:
    assert job["concurrencyPolicy"] == "Forbid"
    assert re.fullmatch(r"\*/5( \*){4}", job["schedule"])
    assert job["startingDeadlineSeconds"] < parse_duration("5m").total_seconds()
    inner = job["jobTemplate"]["spec"]
    assert inner["backoffLimit"] == 0
    assert inner["activeDeadlineSeconds"] > 0
    assert inner["template"]["spec"]["restartPolicy"] == "Never"


def test_the_cron_job_runs_the_verb_unprivileged_and_writes_to_its_claim_only(job: dict[str, Any]) -> None:
    pod = job["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = [*container["command"], *container["args"]]
    assert words[:2] == ["predrain", "score"]
    assert {"--dataset", "--model", "--out"} <= used(words) <= options()
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert sorted(mounts) == ["/data", "/tmp"]
    paths = [word.partition("=")[2] for word in words if "=" in word]
    paths += [each["value"].removeprefix("sqlite:///") for each in container["env"]]
    assert all(path.startswith("/data/") for path in paths if path.startswith("/"))
    assert {mount["name"] for mount in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}


@pytest.mark.parametrize("page", ["docs/scoring.md", "docs/reference/scores.md"])
def test_the_pages_name_options_that_exist_and_files_that_are_there(page: str) -> None:
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / page).parent.joinpath(link).exists(), link
    for line in re.findall(r"predrain score (.*)", text):
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", line)) <= options(), line
    fields = set(KNOWN.to_json())
    if page.endswith("scores.md"):
        assert fields == {name for name in fields if f"`{name}`" in text}
