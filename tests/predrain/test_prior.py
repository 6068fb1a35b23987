"""``predrain prior build``: the same bytes again, from simulated fleets or from matrices of other clusters."""

from pathlib import Path

from typer.testing import CliRunner

from models.learners.prior import load_prior
from predrain.command import app
from simulator.scenarios.drawn import draw_fleet


def run(*arguments: object):
    return CliRunner().invoke(app, [str(word) for word in arguments])


def groups_of(prior: Path) -> set[str]:
    return {name.split("__")[0] for name in load_prior(str(prior)).card.columns}


def test_it_is_built_to_the_same_bytes_again(tmp_path):
    for out in (tmp_path / "one", tmp_path / "two"):
        built = run("prior", "build", "--out", out, "--fleets", 2, "--gpus", 48, "--days", 20)
        assert built.exit_code == 0, built.output
    for file in ("card.json", "model.txt"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert groups_of(tmp_path / "one") == {"history", "peers", "onset", "gaps"}


def test_it_is_built_from_other_clusters_by_name_and_without_what_tells_them_apart(tmp_path):
    run("simulate", "--out", tmp_path / "fleet", "--gpus", 48, "--days", 20, "--acceleration", 30)
    for name, groups in (("one", "[onset, static]"), ("two", "[history, static]")):
        (tmp_path / f"{name}.yaml").write_text(f"features: {{groups: {groups}}}")
        params = ("--dataset", tmp_path / "fleet", "--params", tmp_path / f"{name}.yaml")
        assert run("features", *params, "--out", tmp_path / name).exit_code == 0
    built = run("prior", "build", "--out", tmp_path / "p", "--matrix", tmp_path / "one", "--matrix", tmp_path / "two")
    assert built.exit_code == 0, built.output
    assert groups_of(tmp_path / "p") == {"onset", "history"}


def test_a_folder_that_is_no_prior_is_not_replaced(tmp_path):
    (tmp_path / "notes.txt").write_text("keep")
    refused = run("prior", "build", "--out", tmp_path)
    assert (refused.exit_code, "is not a prior" in refused.output) == (1, True)
    assert (tmp_path / "notes.txt").read_text() == "keep"


def test_a_prior_to_measure_knows_no_fleet_like_those_measured(tmp_path):
    refused = run("prior", "build", "--out", tmp_path / "prior", "--fleets", 3, "--without-silent", 0, 1)
    assert (refused.exit_code, "every fleet is omitted" in refused.output) == (1, True)
    between = (0, (draw_fleet(7, 0).silent + draw_fleet(7, 1).silent) / 2)
    some = ("--fleets", 2, "--gpus", 24, "--days", 14, "--without-silent", *between)
    built = run("prior", "build", "--out", tmp_path / "prior", *some)
    assert built.exit_code == 0, built.output
    made_of = load_prior(str(tmp_path / "prior")).card.made_of
    assert (made_of["fleets"], made_of["without_silent"]) == (1, [*between])
