"""``predrain prepare``: the first stage of ``dvc repro``; brings the dataset of a run to one place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from predrain.console import JsonOption, ParamsOption, params_files, progress, reported, show


def prepare(
    out: Annotated[Path, typer.Option(help="Folder of the dataset; its truth, if any, goes to OUT-truth.")],
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate the demo fleet, or take the dataset that params.yaml names under data.dataset.

    Example: predrain prepare --params params.yaml --out data/dataset
    """
    with reported(), progress("preparing") as advance:
        from pipeline.params import load_params

        loaded = load_params(params_files(params))
        if loaded.data.dataset is not None:
            show(_take(Path(loaded.data.dataset), out), as_json=as_json)
            return
        from simulator.simulate import simulate

        fleet = loaded.simulate
        summary = simulate(
            out,
            gpus=fleet.gpus,
            days=fleet.days,
            seed=fleet.seed,
            scenario=fleet.scenario,
            acceleration=fleet.acceleration,
            progress=advance,
        )
        show(summary.as_dict(), as_json=as_json)


def _take(source: Path, out: Path) -> dict[str, object]:
    """Bring an existing dataset to ``out`` by hard links (copies across file systems), and its truth beside it."""
    from telemetry.errors import InputError
    from telemetry.store import Dataset

    dataset = Dataset.open(source)
    if source.resolve() == out.resolve():
        raise InputError(
            f"{source} is the prepared copy itself", "params.yaml, data.dataset", "Name the original dataset."
        )
    _replace(source, out)
    truth, truth_out = source.with_name(source.name + "-truth"), out.with_name(out.name + "-truth")
    if truth.is_dir():
        _replace(truth, truth_out)
    else:
        shutil.rmtree(truth_out, ignore_errors=True)
        truth_out.mkdir(parents=True)  # dvc wants each output to exist; an empty truth means there is none
    return {"dataset": str(out), "from": str(source), "counts": dataset.meta.counts}


def _replace(source: Path, out: Path) -> None:
    fresh = out.with_name(out.name + ".preparing")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(source, fresh, copy_function=_link)
    shutil.rmtree(out, ignore_errors=True)
    fresh.rename(out)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("prepare")(prepare)
