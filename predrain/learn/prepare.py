"""``predrain prepare``: the first stage of ``dvc repro``; brings the dataset of a run to one place."""

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from predrain.console import progress, show
from predrain.options import JsonOption, ParamsOption, read_params


def prepare(
    out: Annotated[Path, typer.Option(help="Dataset directory; the truth, if any, is written to OUT-truth.")],
    params: ParamsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate the demo fleet, or use the dataset of `data.dataset` in params.yaml.

    Example: predrain prepare --params params.yaml --out data/dataset
    """
    with progress("preparing") as advance:
        loaded = read_params(params)
        if loaded.data.dataset is not None:
            show(_take(Path(loaded.data.dataset), out), as_json=as_json)
            return
        from simulator.simulate import simulate

        show(simulate(out.resolve(), **dict(loaded.simulate), progress=advance), as_json=as_json)


def _take(source: Path, out: Path) -> dict[str, object]:
    """Bring an existing dataset to ``out`` by hard links (copies across file systems), and its truth next to it."""
    from foundation.errors import InputError
    from foundation.files import FolderSwap, disk_errors
    from telemetry.dataset.store import Dataset

    dataset = Dataset.open(source)
    source, out = source.resolve(), out.resolve()
    truth, truth_out = source.with_name(source.name + "-truth"), out.with_name(out.name + "-truth")
    for one, other in ((source, out), (truth, out), (source, truth_out)):
        if one.is_relative_to(other) or other.is_relative_to(one):
            raise InputError(
                f"{one} and {other} are the same folder, or nested",
                "params.yaml data.dataset and --out",
                "Choose another folder.",
            )
    for folder, mark in ((out, "dataset.json"), (truth_out, "truth.json")):
        if folder.exists() and not (folder / mark).is_file() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(
                f"{folder} exists and has no {mark}",
                "--out",
                "Choose another folder, or remove its content.",
            )
    # dvc wants each output to exist; empty: there is no truth
    for folder, copied in ((out, source), (truth_out, truth if truth.is_dir() else None)):
        with FolderSwap(folder) as swap, disk_errors(folder):
            if copied is not None:
                shutil.copytree(copied, swap.path, copy_function=_link, dirs_exist_ok=True)
            swap.commit()
    return {"dataset": str(out), "from": str(source), "counts": dataset.meta.counts}


def _link(source: str, target: str) -> None:
    """Link what is never changed in place; copy the small files that a later import might."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
