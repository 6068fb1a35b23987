"""Run `uv pip` with the package index that pip is configured with; install by pip where uv is unavailable.

    python deploy/uv_pip.py install -r requirements/run.lock
    python deploy/uv_pip.py --python /opt/predrain/bin/python install -r requirements/run.lock
    python deploy/uv_pip.py compile pyproject.toml -o requirements/run.lock

uv itself is installed by pip into the environment of the Python that runs this file (version: requirements/uv.lock).
Standard library only: this file runs before any package is installed.
"""

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Setting of pip, variable of uv, separator that the variable expects between several values (None: one value).
TRANSLATED: tuple[tuple[str, str, str | None], ...] = (
    ("index-url", "UV_DEFAULT_INDEX", None),
    ("extra-index-url", "UV_INDEX", " "),
    ("find-links", "UV_FIND_LINKS", ","),
    ("constraint", "UV_CONSTRAINT", " "),
    ("build-constraint", "UV_BUILD_CONSTRAINT", " "),
    ("trusted-host", "UV_INSECURE_HOST", " "),
    ("cert", "SSL_CERT_FILE", None),
    ("client-cert", "SSL_CLIENT_CERT", None),
    ("proxy", "ALL_PROXY", None),
    ("timeout", "UV_HTTP_TIMEOUT", None),
    ("retries", "UV_HTTP_RETRIES", None),
    ("cache-dir", "UV_CACHE_DIR", None),
    ("keyring-provider", "UV_KEYRING_PROVIDER", None),
    ("require-hashes", "UV_REQUIRE_HASHES", None),
)
FLAGS = {"no-index": "--no-index", "pre": "--prerelease=allow"}
FORMATS = ("only-binary", "no-binary")
TRUE = {"1", "true", "yes", "on", "y", "t"}


def pip_settings(listing: str, command: str) -> dict[str, str]:
    """Return the effective settings of `pip config list`: the environment, then `[COMMAND]`, then `[global]`."""
    by_section: dict[str, dict[str, str]] = {"global": {}, command: {}, ":env:": {}}
    for line in listing.splitlines():
        name, separator, value = line.partition("=")
        section, _, key = name.partition(".")
        if separator and section in by_section:
            by_section[section][key.replace("_", "-").removeprefix("default-")] = str(ast.literal_eval(value))
    return by_section["global"] | by_section[command] | by_section[":env:"]


def uv_environment(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make uv use the same index as pip; variables that are already set have priority."""
    variables = {"UV_NO_PROGRESS": "1"}
    for setting, variable, separator in TRANSLATED:
        value = settings.get(setting, "").strip()
        if value:
            variables[variable] = separator.join(value.split()) if separator else value
    if "UV_INDEX" in variables:
        # pip takes the best version of any index, uv by default only of the first that has the package.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    # The two cache formats differ, so uv uses a subfolder.
    if "UV_CACHE_DIR" in variables:
        variables["UV_CACHE_DIR"] = str(Path(variables["UV_CACHE_DIR"]) / "uv")
    if settings.get("no-cache-dir", "").lower() in TRUE:
        variables["UV_NO_CACHE"] = "1"
    return {name: value for name, value in variables.items() if name not in environment}


def uv_flags(settings: Mapping[str, str]) -> list[str]:
    """Return the options of `uv pip` that have no variable."""
    flags = [flag for setting, flag in FLAGS.items() if settings.get(setting, "").lower() in TRUE]
    for setting in FORMATS:
        flags += [f"--{setting}={package}" for package in settings.get(setting, "").replace(",", " ").split()]
    return flags


def uv_lock() -> Path:
    """Return the lock file of uv, in `requirements/` of the repository or next to this file (container images)."""
    here = Path(__file__).resolve().parent
    return next(path for folder in (here, here.parent) if (path := folder / "requirements" / "uv.lock").exists())


def install_uv(lock: Path) -> bool:
    """Install uv at its locked version, unless it is installed; return whether it can be run."""
    locked = lock.read_text(encoding="utf-8").split(maxsplit=1)[0]
    try:
        if f"uv=={version('uv')}" == locked:
            return True
    except PackageNotFoundError:
        pass
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(lock)]
    return subprocess.run(command, check=False).returncode == 0


def main(arguments: list[str]) -> int:
    """Run `uv pip ARGUMENTS`; fall back to `pip install` where uv is unavailable or fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="Python of the environment to install into")
    parser.add_argument("command", choices=("install", "compile"))
    parsed, remaining = parser.parse_known_args(arguments)
    installing = parsed.command == "install"
    failure = "uv cannot be installed"
    if install_uv(uv_lock()):
        list_settings = [sys.executable, "-m", "pip", "config", "list"]
        listing = subprocess.run(list_settings, capture_output=True, text=True, check=True)
        settings = pip_settings(listing.stdout, parsed.command)
        if not installing:
            # Constraints of this machine must not enter a lock that all machines use.
            settings.pop("constraint", None)
        environment = uv_environment(settings, os.environ)
        command = [sys.executable, "-m", "uv", "pip", parsed.command, "--quiet", *uv_flags(settings)]
        target = ["--python", parsed.python] if installing else []
        code = subprocess.run([*command, *target, *remaining], env=os.environ | environment, check=False).returncode
        if code == 0 or not installing:
            return code
        failure = f"uv exited with {code}"
    if not installing:
        print(f"{failure}: `compile` has no fallback", file=sys.stderr)
        return 1
    print(f"note: {failure}; installing with pip, which takes minutes", file=sys.stderr)
    command = [parsed.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *remaining]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
