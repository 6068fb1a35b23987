"""``predrain init``: a folder of the operator's own, with parameters, a DVC pipeline and what git leaves out."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

import typer

from predrain.console import show
from predrain.options import JsonOption

_FILES: Final = {
    "predrain.yaml": "predrain.yaml",
    "dvc.yaml": "dvc.yaml",
    "gitignore": ".gitignore",
    "README.md": "README.md",
}


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to make; what is in it already is never replaced.")],
    dataset: Annotated[str, typer.Option(help="Folder of the dataset, as the new folder sees it.")] = "../fleet",
    as_json: JsonOption = False,
) -> None:
    """Make a folder in which `dvc repro` learns from your fleet, and `dvc exp` compares experiments.

    Example: predrain init fleet-model --dataset /srv/predrain/fleet
    """
    from foundation.errors import InputError
    from foundation.files import disk_errors, write_bytes

    there = [name for name in _FILES.values() if (folder / name).exists()]
    if there:
        raise InputError(f"{', '.join(there)} already there", str(folder), "Choose another folder, or remove them.")
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for source, name in _FILES.items():
            text = files("predrain").joinpath("scaffold", source).read_text(encoding="utf-8")
            write_bytes(folder / name, text.replace("dataset: ../fleet  ", f"dataset: {dataset}  ").encode())
    show({"folder": str(folder), "files": ", ".join(_FILES.values()), "next": "README.md"}, as_json=as_json)
