"""The shipped systemd units and the CronJob name commands that exist, and hold no more rights than they need."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from predrain.command import app
from tests.policy.test_risk_record import KNOWN

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "deploy" / "systemd"
VERBS = ("serve", "act", "score")
HARDENING = (
    *("NoNewPrivileges", "ProtectSystem", "ProtectHome", "PrivateTmp", "PrivateDevices", "ProtectKernelTunables"),
    *("RestrictAddressFamilies", "RestrictNamespaces", "CapabilityBoundingSet", "SystemCallFilter", "UMask", "User"),
)


class _Many(dict[str, Any]):
    """Keeps a key that a unit file gives several times."""

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, list) and key in self and isinstance(self[key], list):
            value = [*self[key], *value]
        super().__setitem__(key, value)


def unit(name: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, dict_type=_Many, comment_prefixes=("#",))
    parser.optionxform = str
    parser.read(UNITS / f"predrain-{name}.service")
    return parser


def options(verb: str) -> set[str]:
    command = typer.main.get_command(app).commands[verb]
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


def written_options(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


@pytest.mark.parametrize("verb", VERBS)
def test_a_unit_runs_its_verb_with_options_that_it_has(verb: str) -> None:
    service, text = unit(verb)["Service"], (UNITS / f"predrain-{verb}.service").read_text()
    command = shlex.split(service["ExecStart"])
    assert command[:3] == ["/usr/bin/env", "predrain", verb]
    others = {"--loop", "--failed", "--collector"}  # of other programs, which the head of the file names
    assert written_options(service["ExecStart"]) <= options(verb)
    assert written_options(text) <= options(verb) | others
    defaults = dict(re.findall(r"Environment=(PREDRAIN_\w+)=(.*)", text))
    assert set(re.findall(r"\$\{?(PREDRAIN_\w+)", service["ExecStart"])) <= defaults.keys()
    assert {key: service[key] for key in HARDENING} == {key: unit("score")["Service"][key] for key in HARDENING}
    assert (service["ProtectSystem"], service["User"], service["CapabilityBoundingSet"]) == ("strict", "predrain", "")
    if verb == "score":
        assert {"--dataset", "--model", "--out"} <= written_options(service["ExecStart"])
        assert service["Type"] == "oneshot"  # so that a failed run is a failed unit
        assert "NUMBA_CACHE_DIR=%C/predrain/numba" in service["Environment"]  # where it may write
    else:
        assert (service["Restart"], service["KillMode"]) == ("always", "mixed")
        assert unit(verb)["Unit"]["StartLimitIntervalSec"] == "0"  # a registry that is down for an hour is no end
        assert service["MemoryMax"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("verb", VERBS)
def test_systemd_finds_nothing_wrong_with_a_unit(verb: str) -> None:
    command = ["systemd-analyze", "verify", "--man=no", str(UNITS / f"predrain-{verb}.service")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    problems = [line for line in run.stderr.splitlines() if f"predrain-{verb}" in line]
    assert (run.returncode, problems) == (0, [])


def test_the_page_of_scores_names_every_field_of_a_record() -> None:
    text = (ROOT / "docs" / "reference" / "scores.md").read_text()
    assert {name for name in KNOWN.to_json() if f"`{name}`" not in text} == set()
