"""The verb: its help, and what it says when it cannot work."""

from pathlib import Path

import typer
from typer.testing import CliRunner

from predrain.collect.kubernetes import collect_kubernetes


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.callback()(lambda: None)
    app.command("kubernetes")(collect_kubernetes)
    result = CliRunner().invoke(app, ["kubernetes", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_what_cannot_work_is_said_in_one_line(tmp_path: Path) -> None:
    dataset = f"--dataset={tmp_path / 'fleet'}"
    code, text = run(dataset, f"--kubeconfig={tmp_path / 'nothing'}", "--once")
    assert code == 1
    assert text.startswith("predrain: error: no way to the Kubernetes API server")
    assert run(dataset, "--interval=5")[0] == run(dataset, "--interval=0s")[0] == 2
    assert run("--once")[0] == 2
    assert not (tmp_path / "fleet.live").exists()
