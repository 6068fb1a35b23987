"""The shipped units of the service and the controller: commands that exist, no more rights than needed, a told end."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from predrain.act.command import act
from predrain.serve import serve
from serving.server import notify
from tests.serving.http.world import running, small_fleet, write_scores
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


def test_only_the_service_is_waited_for_until_it_listens() -> None:
    assert unit("predrain-serve.service")["Service"]["Type"] == "notify"
    assert unit("predrain-act.service")["Service"]["Type"] == "exec"
    assert unit("predrain-act.service")["Unit"]["ConditionPathExists"] == "/etc/predrain/act.yaml"


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


def test_the_supervisor_is_told_when_the_service_listens_and_when_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_scores(tmp_path / "scores", small_fleet())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with running(tmp_path / "scores"):
            assert supervisor.recv(100) == b"READY=1"
        assert supervisor.recv(100) == b"STOPPING=1"
    assert notify("READY=1") is False  # nobody reads any more
    monkeypatch.setenv("NOTIFY_SOCKET", "nowhere")
    assert notify("READY=1") is False
    monkeypatch.delenv("NOTIFY_SOCKET")
    assert notify("READY=1") is False
