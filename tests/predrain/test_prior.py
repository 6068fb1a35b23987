"""``predrain prior build``: the same arguments give the same bytes, and nothing else is overwritten."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from models.learners.prior import load_prior
from predrain.command import app


def build(out: Path, *more: str):
    size = ("--fleets", "2", "--gpus", "48", "--days", "20")
    return CliRunner().invoke(app, ["prior", "build", "--out", str(out), *size, *more])


def test_it_is_built_to_the_same_bytes_again(tmp_path):
    for name in ("one", "two"):
        built = build(tmp_path / name, "--json")
        assert built.exit_code == 0, built.output
        assert {file.name for file in (tmp_path / name).iterdir()} == {"card.json", "model.txt"}
    for file in ("card.json", "model.txt"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    prior = load_prior(str(tmp_path / "one"))
    assert prior.card.made_of["fleets"] == 2
    assert {name.split("__")[0] for name in prior.card.columns} == {"history", "peers", "onset", "gaps"}


def test_a_folder_that_is_no_prior_is_not_replaced(tmp_path):
    (tmp_path / "notes.txt").write_text("keep")
    refused = build(tmp_path)
    assert (refused.exit_code, "is no prior" in refused.output) == (1, True)
    assert (tmp_path / "notes.txt").read_text() == "keep"
