"""``predrain collect``: telemetry from where it really is, one file a source."""

from __future__ import annotations

import importlib
import pkgutil

import typer

import predrain

SOURCES = typer.Typer(
    name="collect",
    help="Gather telemetry, events and jobs from where they are, and fold them into a dataset.",
    no_args_is_help=True,
)

for _found in sorted(each.name for each in pkgutil.iter_modules(predrain.__path__) if each.name.startswith("collect_")):
    importlib.import_module(f"predrain.{_found}").add_to(SOURCES)


def add_to(app: typer.Typer) -> None:
    """Register the group of verbs."""
    app.add_typer(SOURCES)
