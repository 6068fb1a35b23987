"""Versions of the libraries that a bundle depends on: those it was written with against those that run."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any, Final

from features.errors import InputError

PARTS: Final[dict[str, int]] = {"lightgbm": 1, "numpy": 1, "scikit-learn": 2, "skops": 1, "xgboost": 1}
"""How many leading parts of a version must agree. scikit-learn's fitted attributes change between minor versions, the
others keep their formats within a major one."""

_DISTRIBUTIONS: Final[dict[str, tuple[str, ...]]] = {"xgboost": ("xgboost-cpu", "xgboost")}


def running_versions() -> dict[str, str]:
    """Give the version of each library that is installed, without importing it."""
    found = {}
    for name in PARTS:
        for distribution in _DISTRIBUTIONS.get(name, (name,)):
            try:
                found[name] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def check_libraries(saved: Any, manifest: Path) -> None:
    """Refuse a bundle that other versions of its libraries wrote.

    Raises ``InputError`` if it says nothing of one, or a version that is not the running one's. A library that is not
    installed is not compared: nothing of the bundle can be read by it.
    """
    running = running_versions()
    for name, parts in PARTS.items():
        said, here = saved.get(name) if isinstance(saved, dict) else None, running.get(name)
        if not isinstance(said, str) or (here is not None and said.split(".")[:parts] != here.split(".")[:parts]):
            raise InputError(
                f"the bundle was written with {name} {said}, this is {here}",
                str(manifest),
                f"Install {name} {'.'.join(str(said).split('.')[:parts])}, or train the bundle again.",
            )
