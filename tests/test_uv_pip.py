"""`deploy/uv_pip.py` gives uv the index that pip is configured with and installs with pip where uv is unavailable."""

import importlib.util
import os
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.processes import ROOT

SCRIPT = ROOT / "deploy" / "uv_pip.py"
specification = importlib.util.spec_from_file_location("uv_pip", SCRIPT)
assert specification.loader is not None
uv_pip = importlib.util.module_from_spec(specification)
specification.loader.exec_module(uv_pip)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index with one package, `gauge` 1.0, and no uv."""
    folder = tmp_path_factory.mktemp("index") / "gauge"
    folder.mkdir(parents=True)
    wheel = "gauge-1.0-py3-none-any.whl"
    with zipfile.ZipFile(folder / wheel, "w") as archive:
        archive.writestr("gauge.py", "VALUE = 1\n")
        archive.writestr("gauge-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: gauge\nVersion: 1.0\n")
        archive.writestr("gauge-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("gauge-1.0.dist-info/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{wheel}">{wheel}</a>')
    return folder.parent


def environment(folder: Path, *, with_pip: bool) -> Path:
    """A fresh environment; returns its Python."""
    venv.create(folder, with_pip=with_pip)
    return folder / "bin" / "python"


def install(runner: Path | str, target: Path, index: Path, requirement: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    configured = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index.as_uri(), "PIP_RETRIES": "0"}
    command = [str(runner), str(SCRIPT), "--python", str(target), "install", requirement]
    return subprocess.run(command, env=kept | configured, capture_output=True, text=True, timeout=120, check=False)


def installer(target: Path) -> str:
    script = "from importlib.metadata import distribution; print(distribution('gauge').read_text('INSTALLER'))"
    return subprocess.run([target, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


def test_uv_installs_from_the_index_that_pip_is_configured_with(index: Path, tmp_path: Path) -> None:
    try:
        if f"uv=={version('uv')}" != uv_pip.uv_lock().read_text().split()[0]:
            pytest.skip("another version of uv is installed")
    except PackageNotFoundError:
        pytest.skip("uv is not installed")
    target = environment(tmp_path / "venv", with_pip=False)
    run = install(sys.executable, target, index, "gauge==1.0")
    assert run.returncode == 0, run.stderr
    assert installer(target) == "uv"
    assert "note:" not in run.stderr


def test_pip_installs_where_uv_is_unavailable_and_a_package_that_nobody_has_fails(index: Path, tmp_path: Path) -> None:
    target = environment(tmp_path / "venv", with_pip=True)
    assert install(target, target, index, "gauge==2.0").returncode != 0
    run = install(target, target, index, "gauge==1.0")
    assert run.returncode == 0, run.stderr
    assert installer(target) == "pip"
    assert "note: uv cannot be installed; installing with pip" in run.stderr


def test_the_environment_overrides_the_command_section_which_overrides_the_global_one() -> None:
    listing = (
        "global.index-url='https://a/simple'\nglobal.timeout='10'\ninstall.index-url='https://b/simple'\n"
        ":env:.default-timeout='30'\ndownload.index-url='https://c/simple'\n"
    )
    assert uv_pip.pip_settings(listing, "install") == {"index-url": "https://b/simple", "timeout": "30"}


def test_several_values_are_separated_as_uv_expects() -> None:
    settings = {
        "extra-index-url": "https://a/simple\nhttps://b/simple",
        "find-links": "/wheels https://c/wheels",
        "cert": "/etc/my certificates/ca.pem",
        "no-cache-dir": "true",
        "cache-dir": "/cache",
    }
    assert uv_pip.uv_environment(settings, {}) == {
        "UV_NO_PROGRESS": "1",
        "UV_INDEX": "https://a/simple https://b/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels,https://c/wheels",
        "SSL_CERT_FILE": "/etc/my certificates/ca.pem",
        "UV_NO_CACHE": "1",
        "UV_CACHE_DIR": "/cache/uv",
    }


def test_a_variable_of_uv_that_is_set_is_kept() -> None:
    settings = {"index-url": "https://a/simple"}
    assert "UV_DEFAULT_INDEX" not in uv_pip.uv_environment(settings, {"UV_DEFAULT_INDEX": "https://b/simple"})


def test_options_without_a_variable_become_flags() -> None:
    settings = {"no-index": "true", "only-binary": ":all:", "no-binary": "numpy,scipy", "pre": "no"}
    assert uv_pip.uv_flags(settings) == ["--no-index", "--only-binary=:all:", "--no-binary=numpy", "--no-binary=scipy"]
