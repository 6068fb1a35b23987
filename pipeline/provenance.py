"""Where a result comes from: the code revision, the versions of the libraries that made it, and the fleet."""

import hashlib
import subprocess
from collections.abc import Collection, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_LIBRARIES = (
    "numpy",
    "pandas",
    "pyarrow",
    "numba",
    "scikit-learn",
    "lightgbm",
    "xgboost-cpu",
    "skops",
    "mlflow",
    "predrain",
)
_TIMEOUT_S = 10
_SKETCH_SIZE = 64


def code_revision() -> str:
    """Return the git revision that the running code was checked out at.

    Returns: the commit, with ``-dirty`` where tracked files differ from it; ``unknown`` where the code is no checkout,
    such as an installation that lies within another's.
    """
    here = Path(__file__).resolve().parents[1]
    try:
        if Path(_git(here, "rev-parse", "--show-toplevel")).resolve() != here:
            return "unknown"
        commit = _git(here, "rev-parse", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def library_versions(names: Iterable[str] = _LIBRARIES) -> dict[str, str]:
    """Return the versions of libraries, by default of those that shape a result, by name; ``absent``: not installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    return versions


def fleet_sketch(units: Iterable[str]) -> list[str]:
    """Return a sample of a fleet's units as digests: those 64 with the smallest ones, or all of a smaller fleet.

    The sample of a fleet is found again in any later dataset of the same fleet, and hardly at all in another's.
    """
    return sorted(hashlib.sha256(unit.encode()).hexdigest()[:16] for unit in set(units))[:_SKETCH_SIZE]


def share_of_fleet(sketch: Collection[str], units: Iterable[str]) -> float:
    """Return the fraction of the sketched units that are in ``units``."""
    known = {hashlib.sha256(unit.encode()).hexdigest()[:16] for unit in units}
    return sum(digest in known for digest in sketch) / max(len(sketch), 1)


def _git(folder: Path, *args: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *args],  # noqa: S607 - the user's own git, wherever it is
        capture_output=True,
        text=True,
        check=True,
        timeout=_TIMEOUT_S,
    )
    return done.stdout.strip()
