"""Each role's image, built without a daemon on Debian's packages: its command works as one user on a read-only root."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.processes import ROOT, answers, running
from tests.serving.http.world import small_fleet
from tests.serving.score_folder import write_scores
from tests.waiting import free_port, wait

TOOLS = ("buildah", "mmdebstrap", "unshare")
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="images are built in a chroot, by root"),
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"not all of {', '.join(TOOLS)} are installed"),
]
# The image as a root that cannot be written, with a folder of its own for what a process writes; gone with the process.
CONTAINER = """set -e; root=$("$@" mount "$CONTAINER")
mount --bind "$root" "$root"; mount -o remount,bind,ro "$root"; mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"; mount -t tmpfs tmpfs "$root/tmp"; mount --bind "$DATA" "$root/$WORK"
eval "exec env -i $VARIABLES chroot --userspec=$OWNER --groups= '$root' env -C $WORK $COMMAND"
"""


def done(*command: object, **environment: str) -> str:
    """Run to the end, which has to be a good one; returns what it printed."""
    made = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=os.environ | environment, timeout=600, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert made.returncode == 0, f"{command[:4]}: {made.stdout[-3000:]}"
    return made.stdout


@dataclass(frozen=True, slots=True)
class Builder:
    """A store of images in a folder; mounts are each process's own, so that nothing stays mounted."""

    folder: Path

    @property
    def buildah(self) -> list[str]:
        return ["buildah", "--root", f"{self.folder}/store", "--runroot", f"{self.folder}/run"]

    def run(self, *arguments: object) -> str:
        return done("unshare", "--mount", *self.buildah, *arguments).strip()

    def build(self, role: str) -> str:
        """Build a role's image as the Containerfile says, with wheels that lie there in place of an index."""
        self.run(
            "build", "--isolation", "chroot", "--tag", role, "--build-arg", "BASE=localhost/base",
            "--build-arg", f"ROLE={role}", "--volume", f"{self.folder}/wheels:/wheels:ro",
            "--volume", f"{self.folder}/pip.conf:/etc/pip.conf:ro",
            "--file", ROOT / "deploy" / "container" / "Containerfile", ROOT,
        )  # fmt: skip
        size = json.loads(self.run("images", "--json", f"localhost/{role}"))[0]["size"]
        print(f"image of the role {role}: {size}")
        return self.run("from", "--pull-never", f"localhost/{role}").splitlines()[-1]

    def remove(self, role: str) -> None:
        """Give the disk back that an image and its container took."""
        self.run("rm", "--all")
        self.run("rmi", "--force", f"localhost/{role}")
        self.run("rmi", "--prune")

    def start(self, container: str, data: Path, *command: str, **variables: str) -> tuple[list[str], dict[str, str]]:
        """Give the command, with its environment, that starts the image's own command with more arguments."""
        image = json.loads(self.run("inspect", container))["OCIv1"]["config"]
        quoted = [f"'{word}'" for word in (*image["Entrypoint"], *command)]
        shown = [f"'{pair}'" for pair in (*image["Env"], *(f"{key}={value}" for key, value in variables.items()))]
        shutil.chown(data, int(image["User"].split(":")[0]))
        environment = os.environ | {
            "CONTAINER": container, "DATA": str(data), "WORK": image["WorkingDir"], "OWNER": image["User"],
            "VARIABLES": " ".join(shown), "COMMAND": " ".join(quoted),
        }  # fmt: skip
        return ["unshare", "--mount", "sh", "-c", CONTAINER, "sh", *self.buildah], environment

    def command(self, container: str, data: Path, *command: str, **variables: str) -> str:
        started, environment = self.start(container, data, *command, **variables)
        return done(*started, **environment)

    def files(self, container: str) -> set[str]:
        """Give the mode, owner and target, and the digest, of each file of a container."""
        script = r"""cd "$("$@")"; find . -printf '%M %U:%G %p %l\n'; find . -type f -exec sha256sum {} +"""
        lines = done("unshare", "--mount", "sh", "-c", script, "sh", *self.buildah, "mount", container).splitlines()
        assert len(lines) > 10_000, lines[-3:]
        return set(lines)


@pytest.fixture(scope="module")
def builder() -> Iterator[Builder]:
    """A base of Debian's packages, and the wheels of both roles."""
    with tempfile.TemporaryDirectory(prefix="images", ignore_cleanup_errors=True) as name:
        builder = Builder(Path(name))
        (context := builder.folder / "base").mkdir()
        with running(
            [
                "mmdebstrap",
                "--variant=minbase",
                "--dpkgopt=force-unsafe-io",
                "--include=python3-venv,ca-certificates",
                "bookworm",
                context / "base.tar",
            ],
            context / "log",
        ) as debian:
            locks = [option for role in ("serve", "act", "uv") for option in ("-r", f"requirements/{role}.lock")]
            # The locks have hashes, and pip requires them of all packages of a command or of none.
            for packages in (["setuptools>=77"], locks):
                done(
                    sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--python-version=3.11",
                    "--dest", builder.folder / "wheels", *packages,
                )  # fmt: skip
            if debian.wait(300):
                pytest.skip(f"Debian's packages cannot be had here: {(context / 'log').read_text()[-300:]}")
        (builder.folder / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
        (context / "Containerfile").write_text("FROM scratch\nADD base.tar /\n")
        builder.run("build", "--isolation", "chroot", "--tag", "base", context)
        (context / "base.tar").unlink()
        yield builder
        builder.run("rm", "--all")


def test_the_image_of_the_controller_acts_and_is_built_twice_alike(builder: Builder, tmp_path: Path) -> None:
    container = builder.build("act")
    assert "--dry-run" in builder.command(container, tmp_path, "act", "--help", COLUMNS="200")
    decided = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=20)
    write_scores(tmp_path / "scores", small_fleet(decided), decided)
    nodes = [{"name": f"n{number}", "cluster": "c", "group": "g"} for number in range(1, 6)]
    (tmp_path / "cluster.json").write_text(json.dumps({"format": 1, "nodes": nodes}))
    shutil.copy(ROOT / "deploy" / "act" / "act.yaml", tmp_path)
    (tmp_path / "cluster.json").chmod(0o666)
    builder.command(container, tmp_path, "act", "--cluster", "cluster.json", "--scores", "scores", "--json")
    assert (tmp_path / "ledger.db").stat().st_uid == 10001
    first = builder.files(container)
    builder.remove("act")
    second = builder.files(builder.build("act"))
    assert first ^ second == set()
    builder.remove("act")


def test_the_image_of_the_service_learns_scores_and_answers(
    builder: Builder, tmp_path: Path, light_params_file: Path
) -> None:
    container = builder.build("serve")
    shutil.copy(light_params_file, tmp_path / "light.yaml")
    for line in (
        "collect --help",
        "retrain --help",
        "simulate --gpus 32 --days 40 --acceleration 100 --seed 131 --scenario base --out fleet",
        "features --dataset fleet --out matrix --params light.yaml",
        "train --matrix matrix --out bundle --params light.yaml",
        "score --dataset fleet --model bundle --out scores --params light.yaml",
    ):
        builder.command(container, tmp_path, *line.split(), NUMBA_CACHE_DIR="/data/numba")
    port = free_port()
    command, environment = builder.start(
        container, tmp_path, "serve", "--scores", "scores", "--no-extender", "--listen", f"127.0.0.1:{port}"
    )
    with running(command, tmp_path / "log", env=environment) as process:
        wait(lambda: process.poll() is not None or answers(port))
        assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
