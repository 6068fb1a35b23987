"""The systemd units and Slurm's installer: what is started parses, one file sets it, and nothing is left behind."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer
import yaml

from predrain.command import app
from scheduler.controller.settings import read_settings
from scheduler.slurm.settings import SlurmSettings
from tests.processes import invoke
from tests.scheduler.score_files import record, write

DEPLOY = Path(__file__).parents[1] / "deploy"
SERVICES = sorted((DEPLOY / "systemd").glob("*.service"))
HARDENING = {
    *("NoNewPrivileges", "ProtectSystem", "ProtectHome", "PrivateTmp", "PrivateDevices", "ProtectKernelTunables"),
    *("RestrictAddressFamilies", "RestrictNamespaces", "CapabilityBoundingSet", "SystemCallFilter", "UMask", "User"),
}
SETTINGS = dict(
    line.split("=", 1) for line in (DEPLOY / "systemd" / "predrain.env").read_text().splitlines() if line[:1].isupper()
)


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.stem)
def test_a_unit_starts_a_command_that_parses_with_the_settings_of_the_one_file(unit: Path) -> None:
    text = unit.read_text(encoding="utf-8")
    own = dict(re.findall(r"^Environment=(\w+)=(.*)$", text, flags=re.M))
    assert re.findall(r"^EnvironmentFile=(.*)$", text, flags=re.M) == ["-/etc/predrain/predrain.env"]
    settings = {"STATE_DIRECTORY": "/var/lib/predrain", **own, **SETTINGS}
    defaults = {name: value for name, value in own.items() if name.startswith(("PREDRAIN_", "MLFLOW_TRACKING_URI"))}
    assert defaults.items() <= SETTINGS.items(), "the file shows the defaults that a unit has without it"
    (line,) = re.findall(r"^ExecStart=(.*)$", text, flags=re.M)
    whole = re.sub(r"\$\{(\w+)\}", lambda found: settings[found[1]], line)
    env, program, *words = shlex.split(re.sub(r"\$(\w+)", lambda found: settings[found[1]], whole))
    assert (env, program) == ("/usr/bin/env", "predrain")
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    _, rest, _ = command.make_parser(command.context_class(command)).parse_args(words)
    assert rest == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_finds_nothing_wrong_with_the_units() -> None:
    units = [str(unit) for unit in sorted((DEPLOY / "systemd").glob("predrain-*.*"))]
    command = ["systemd-analyze", "verify", "--man=no", *units]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert [line for line in done.stderr.splitlines() if "predrain" in line] == []


@pytest.mark.parametrize("verb", ["serve", "act", "score"])
def test_units_are_hardened_and_restart_or_fail_visibly(verb: str) -> None:
    text = (DEPLOY / "systemd" / f"predrain-{verb}.service").read_text(encoding="utf-8")
    keys = dict(re.findall(r"^(\w+)=(.*)$", text, flags=re.M))
    assert keys.keys() >= HARDENING
    assert (keys["ProtectSystem"], keys["User"], keys["CapabilityBoundingSet"]) == ("strict", "predrain", "")
    if verb == "score":
        assert keys["Type"] == "oneshot"  # a failed run is a failed unit
        assert "NUMBA_CACHE_DIR=%C/predrain/numba" in text
    else:
        # a registry may be down for an hour
        assert (keys["Restart"], keys["KillMode"], keys["StartLimitIntervalSec"]) == ("always", "mixed", "0")
        assert keys["MemoryMax"]


def script(name: str, root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["sh", str(DEPLOY / "slurm" / f"{name}.sh"), "--root", str(root), *options],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "PATH": path},
    )  # fmt: skip


def files(root: Path) -> dict[str, bytes]:
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def test_an_installation_done_again_keeps_settings_and_its_slurm_block_has_every_default(tmp_path: Path) -> None:
    assert "would run: install" in script("install", tmp_path, "--dry-run").stdout
    assert files(tmp_path) == {}
    assert script("install", tmp_path).returncode == 0
    act = tmp_path / "etc/predrain/act.yaml"
    block = yaml.safe_load(act.read_text())["slurm"]
    assert set(block) == set(SlurmSettings.__dataclass_fields__)
    assert read_settings(act).slurm == SlurmSettings(folder="/var/lib/predrain/slurm")
    (tmp_path / "etc/predrain/predrain.env").write_text("PREDRAIN_SCHEDULER=slurm\n")
    before = files(tmp_path)
    again = script("install", tmp_path)
    assert again.stdout == "installed: nothing new\n"
    assert files(tmp_path) == before
    assert script("install", tmp_path, "--node").stdout == (
        "installed: predrain-kernel-log.service predrain-nvml.service\n"
    )


def test_a_dry_run_shows_everything_on_a_machine_that_has_nothing_yet(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", str(DEPLOY / "slurm" / "install.sh"), "--dry-run"],
        capture_output=True, text=True, timeout=60, check=False, env={"PATH": os.environ["PATH"]}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for unit in sorted((DEPLOY / "systemd").glob("predrain-*.*")):
        if unit.stem not in ("predrain-kernel-log", "predrain-nvml"):
            assert unit.name in done.stdout
    assert "would run: systemctl enable --now predrain-prometheus.timer" in done.stdout
    assert "would run: systemctl enable --now predrain-tickets.timer" in done.stdout


@pytest.mark.parametrize(("url", "runs"), [("", False), ("http://prometheus:9090", True)])
def test_the_unit_of_a_prometheus_is_skipped_until_an_address_is_set(url: str, runs: bool) -> None:
    text = (DEPLOY / "systemd" / "predrain-prometheus.service").read_text(encoding="utf-8")
    (condition,) = re.findall(r"^ExecCondition=(.*)$", text, flags=re.M)
    words = [word.replace("${PREDRAIN_PROMETHEUS}", url) for word in condition.split()]
    assert (subprocess.run(words, check=False).returncode == 0) is runs


def marked(root: Path) -> Path:
    """Describe a cluster, let the controller mark a node, and set the installed units to that cluster."""
    cluster, ledger = root / "cluster.json", root / "var/lib/predrain/ledger.db"
    names = [f"n{number}" for number in range(12)]
    nodes = [{"name": name, "cluster": "c", "group": "g", "rack": name} for name in names]
    cluster.write_text(json.dumps({"format": 1, "nodes": nodes}))
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    records = [record(f"gpu-{name}", name, 0.9 if name == "n3" else 0.01, now) for name in names]
    write(root / "scores", *records, at=now, model={"fitted_at": (now - timedelta(days=1)).isoformat()})
    settings = root / "etc/predrain/act.yaml"
    text = settings.read_text().replace("pinned: {}", "pinned: {c/g: soft}").replace("rise_after: 2", "rise_after: 1")
    settings.write_text(text)
    ledger.parent.mkdir(parents=True)
    words = ["act", "--cluster", cluster, "--scores", root / "scores", "--settings", settings, "--ledger", ledger]
    invoke(*words)
    (root / "etc/predrain/predrain.env").write_text(
        "# where the units act\nPREDRAIN_SCHEDULER=file\n"
        f"PREDRAIN_ACT_OPTIONS=--cluster {cluster}\nPREDRAIN_LEDGER={ledger}\n"
    )
    return cluster


def taints(cluster: Path) -> int:
    return sum(len(node.get("taints", ())) for node in json.loads(cluster.read_text())["nodes"])


def test_an_uninstallation_takes_marks_off_first_and_leaves_data_unless_they_are_purged(tmp_path: Path) -> None:
    root = tmp_path / "root"
    script("install", root)
    cluster = marked(root)
    assert taints(cluster) == 1
    away = cluster.rename(root / "away.json")
    refused = script("uninstall", root)
    assert refused.returncode == 1
    assert "nothing was uninstalled" in refused.stderr
    assert (root / "etc/systemd/system/predrain-act.service").is_file()
    away.rename(cluster)

    assert "would run: predrain act" in script("uninstall", root, "--dry-run").stdout
    assert taints(cluster) == 1
    done = script("uninstall", root)
    assert (done.returncode, taints(cluster)) == (0, 0), done.stderr
    assert not list(root.glob("etc/sys*/**/predrain*"))
    assert {"etc/predrain/act.yaml", "var/lib/predrain/ledger.db"} <= set(files(root))
    assert script("uninstall", root, "--purge").returncode == 0
    assert not list(root.rglob("*predrain*"))
