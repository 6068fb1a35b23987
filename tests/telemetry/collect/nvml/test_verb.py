"""What the verb refuses before it touches the driver."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from predrain.command import app


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give one of --dataset and --spool"),
        (["--dataset", "a", "--spool", "b"], "give one of --dataset and --spool"),
        (["--spool", "b", "--bearer-token-file", "t"], "is only used with --push"),
        (["--spool", "b", "--interval", "30"], "'30' is not a duration"),
        (["--spool", "b", "--interval", "0s"], "an interval of 0 s would never rest"),
        (["--spool", "b", "--spool-limit", "much"], "'much' is not a size"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    result = CliRunner().invoke(app, ["collect", "nvml", *options])
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize("push", ["ftp://host", "/var/lib/other"])
def test_a_place_that_cannot_be_pushed_to_is_refused(tmp_path: Path, push: str) -> None:
    result = CliRunner().invoke(app, ["collect", "nvml", "--spool", str(tmp_path), "--push", push, "--once"])
    assert result.exit_code == 1
    assert f"{push!r} is not the address of a server (--push)" in result.output
