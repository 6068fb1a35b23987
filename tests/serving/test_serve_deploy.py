"""The shipped units of the service and the controller: commands that exist, no more rights than needed, a told end."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable

import pytest
import typer

from predrain.act.command import act
from predrain.serve import serve
from tests.serving.test_batch_deploy import UNITS, unit, used

HARDENING = (
    *("NoNewPrivileges", "ProtectSystem", "ProtectHome", "PrivateTmp", "PrivateDevices", "ProtectKernelTunables"),
    *("RestrictAddressFamilies", "RestrictNamespaces", "CapabilityBoundingSet", "SystemCallFilter", "UMask", "User"),
)


def options(verb: Callable[..., None]) -> set[str]:
    app = typer.Typer()
    app.command()(verb)
    return {option for parameter in typer.main.get_command(app).params for option in parameter.opts}


@pytest.mark.parametrize(("name", "verb"), [("serve", serve), ("act", act)])
def test_a_unit_runs_its_verb_with_options_that_it_has(name: str, verb: Callable[..., None]) -> None:
    path = UNITS / f"predrain-{name}.service"
    service, text = unit(path.name)["Service"], path.read_text()
    words = shlex.split(service["ExecStart"])
    assert words[:3] == ["/usr/bin/env", "predrain", name]
    known = options(verb)
    assert used(words) <= known
    # Also those that its head proposes.
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) <= known | {"--loop"}
    defaults = dict(re.findall(r"Environment=(PREDRAIN_\w+)=(.*)", text))
    assert set(re.findall(r"\$\{?(PREDRAIN_\w+)", service["ExecStart"])) <= defaults.keys()
    score = unit("predrain-score.service")["Service"]
    assert {key: service[key] for key in HARDENING} == {key: score[key] for key in HARDENING}
    assert (service["Restart"], service["KillMode"]) == ("always", "mixed")
    assert unit(path.name)["Unit"]["StartLimitIntervalSec"] == "0"  # a registry that is down for an hour is no end
    assert service["MemoryMax"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("name", ["serve", "act", "score"])
def test_systemd_finds_nothing_wrong_with_a_unit(name: str) -> None:
    run = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(UNITS / f"predrain-{name}.service")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = [line for line in run.stderr.splitlines() if f"predrain-{name}" in line]
    assert (run.returncode, told) == (0, [])
