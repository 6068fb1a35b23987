"""The wheel, installed alone, runs from a folder that holds foreign packages of the same names as our rooms."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.house_size import ROOMS

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.system


def run(*args: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | environment
    return subprocess.run(
        [str(arg) for arg in args], cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel, and the third-party libraries of the running one by path only."""
    base = tmp_path_factory.mktemp("wheel")
    built = run(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", base, ROOT, cwd=base
    )
    assert built.returncode == 0, built.stderr
    wheel = next(base.glob("predrain-*.whl"))
    assert run(sys.executable, "-m", "venv", base / "env", cwd=base).returncode == 0
    python = base / "env" / "bin" / "python"
    assert run(python, "-m", "pip", "install", "-q", "--no-deps", wheel, cwd=base).returncode == 0
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=base).stdout.strip())
    # a path in a .pth file does not process the .pth files inside it, so the editable install stays out
    (site / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return base / "env" / "bin"


def test_the_wheel_runs_where_foreign_rooms_lie(installed: Path, tmp_path: Path, light_params_file: Path) -> None:
    for room in ("models", "features", "data", "telemetry"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("raise RuntimeError('a foreign package was imported')\n")
    where = run(installed / "python", "-I", "-c", "import telemetry; print(telemetry.__file__)", cwd=tmp_path)
    assert str(installed.parent) in where.stdout, where.stderr
    assert "simulate" in run(installed / "predrain", "--help", cwd=tmp_path).stdout
    options = ["--gpus", "32", "--days", "40", "--seed", "131", "--acceleration", "100", "--out", "fleet"]
    simulated = run(installed / "predrain", "simulate", *options, cwd=tmp_path)
    assert simulated.returncode == 0, simulated.stderr
    options = f"--dataset fleet --out replay --params {light_params_file}".split()
    replayed = run(installed / "predrain", "backtest", *options, cwd=tmp_path)
    assert replayed.returncode == 0, replayed.stderr
    assert (tmp_path / "replay" / "report" / "index.html").is_file()
    assert (tmp_path / "replay" / "predictions.parquet").is_file()


def test_the_wheel_holds_the_rooms_and_nothing_else(installed: Path) -> None:
    wheel = next(installed.parents[1].glob("predrain-*.whl"))
    import zipfile

    names = set(zipfile.ZipFile(wheel).namelist())
    pages = {f"serving/pages/templates/{path.name}" for path in (ROOT / "serving" / "pages" / "templates").iterdir()}
    assert pages <= names, "pyproject's package-data leaves files of the pages out"
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(ROOMS)
