"""Whether PyTorch is there, which the extra ``sequence`` installs, and the error where it is not."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util

from foundation.errors import InputError

NEEDED = ("torch", "safetensors")
"""Packages of the extra."""

NEEDS_IT = "parameter models.learners, or the learners of the bundle"


def versions() -> dict[str, str]:
    """Give the versions of the extra's packages, without the build that a wheel names (``+cpu``)."""
    return {package: importlib.metadata.version(package).split("+")[0] for package in NEEDED}


def require_torch(name: str) -> None:
    """Refuse to go on without PyTorch.

    Raises ``InputError`` if PyTorch or safetensors is not installed, or cannot be loaded.
    """
    absent = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if absent:
        raise InputError(
            f"the learner {name} needs {' and '.join(absent)}, which predrain does not install by itself",
            NEEDS_IT,
            "Run: pip install 'predrain[sequence]'. To be spared gigabytes of CUDA libraries, first run: "
            "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu, which is PyTorch's own index "
            "of CPU builds.",
        )
    for package in NEEDED:
        try:
            importlib.import_module(package)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:  # half installed, or of another platform
            raise InputError(
                f"the learner {name} needs {package}, which is installed and cannot be loaded: {error}",
                NEEDS_IT,
                f"Reinstall it: pip install --force-reinstall {package}.",
            ) from error
