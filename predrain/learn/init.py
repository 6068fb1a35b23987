"""``predrain init``: creates a project with parameters, a DVC pipeline, a README and a .gitignore."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final

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
    folder: Annotated[Path, typer.Argument(help="Project directory to create; existing files are not replaced.")],
    dataset: Annotated[str, typer.Option(help="Dataset directory, relative to the project directory.")] = "../fleet",
    as_json: JsonOption = False,
) -> None:
    """Create a project for `dvc repro` and `dvc exp` on your dataset.

    If the dataset exists, the parameters use its step.

    Example: predrain init fleet-model --dataset /srv/predrain/fleet
    """
    from foundation.errors import InputError
    from foundation.files import disk_errors, write_bytes

    existing = [name for name in _FILES.values() if (folder / name).exists()]
    if existing:
        raise InputError(f"{', '.join(existing)} already exist", str(folder), "Choose another folder, or remove them.")
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        step, contents = _contents_of(folder / dataset)
        for source, name in _FILES.items():
            text = files("predrain").joinpath("scaffold", source).read_text(encoding="utf-8")
            text = text.replace("dataset: ../fleet  ", f"dataset: {dataset}  ")
            text = text.replace("decision:\n", f"telemetry:\n  step: {step}\ndecision:\n") if step else text
            write_bytes(folder / name, text.encode())
    show({"folder": str(folder), "files": ", ".join(_FILES.values()), **contents, "next": "README.md"}, as_json=as_json)


def _contents_of(dataset: Path) -> tuple[str, dict[str, Any]]:
    """Return the step and the contents of a dataset; both empty if it does not exist yet."""
    from foundation.durations import format_duration
    from telemetry.dataset.meta import META_NAME
    from telemetry.dataset.store import Dataset

    if not (dataset / META_NAME).is_file():
        return "", {}
    meta = Dataset.open(dataset).meta
    step = format_duration(meta.step)
    return step, {"dataset": str(dataset), "step": step, **meta.counts, "quarantined": dict(meta.quarantine)}
