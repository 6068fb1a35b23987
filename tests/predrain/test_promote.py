"""The verb ``promote``: usage, messages, exit codes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.promotion import PromotionResult
from predrain.command import app


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "the gate compares on recent data"),
        (["--matrix", "a", "--dataset", "b"], "give either --dataset or --matrix"),
        (["--force"], "--force needs --reason"),
        (["--rollback", "--to", "3"], "--rollback takes no"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(given: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["promote", *given], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert message in done.output


def test_an_absent_store_is_one_line_and_is_not_made(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["promote", "--rollback", "--registry", f"sqlite:///{tmp_path / 'no.db'}"])
    assert done.exit_code == 1
    assert "no store here" in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("action", "code"), [("promoted", 0), ("forced", 0), ("refused", 1)])
def test_a_verdict_is_printed_and_is_the_exit_code(action: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decision = PromotionResult(action, "predrain", 2, 1, 1 if action == "refused" else 2, dry_run=False)
    monkeypatch.setattr("pipeline.promotion.promote", lambda *_args, **_kwargs: decision)
    done = CliRunner().invoke(app, ["promote", "--matrix", "m", "--json"])
    assert done.exit_code == code
    assert json.loads(done.output)["action"] == action
