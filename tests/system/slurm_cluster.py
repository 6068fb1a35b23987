"""A real Slurm on loopback: munged, slurmctld and some slurmd, each in the foreground, ended by their handles.

Needs root and Debian's munge, slurmctld, slurmd, slurm-client and slurm-wlm-jwt-plugin; for accounting also slurmdbd,
slurm-wlm-mysql-plugin and mariadb-server-core. Tests run on the installed release (Debian 12: 22.05) and on that of
Debian 13 (24.11), which they unpack themselves.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from foundation.slurm import states_of
from tests.waiting import free_port, listens

RELEASES: Final = ("installed", "trixie")
"""Releases of Debian whose Slurm is tested."""

PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sinfo", "scontrol", "squeue", "sbatch")
CONFIG: Final = """\
ClusterName=t
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.socket
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key={root}/jwt.key
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
CommunicationParameters=NoInAddrAny
SlurmdParameters=config_overrides
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
GresTypes=gpu
ReturnToService=2
RebootProgram=/bin/true
SlurmdTimeout=10
KillWait=2
PropagateResourceLimits=NONE
{nodes}
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
ACCOUNTING: Final = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={root}/run/munge.socket
AccountingStorageTRES=gres/gpu
"""
DBD_CONFIG: Final = """\
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.socket
DbdHost=localhost
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser=root
StorageLoc=slurm
LogFile={root}/log/slurmdbd.log
PidFile={root}/run/slurmdbd.pid
"""
NODE: Final = (
    "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=8 Sockets=1 CoresPerSocket=8 "
    "ThreadsPerCore=1 RealMemory=1000 Gres=gpu:h100:{gpus} State=UNKNOWN"
)


def why_not() -> str | None:
    """Return why no Slurm can be started here; None if one can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"Slurm is not installed: {', '.join(missing)} (apt-get install munge slurmctld slurmd slurm-client)"
    return None if os.geteuid() == 0 else "Slurm's daemons are started as root here"


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def programs_of(release: str) -> Path | None:
    """Return the folder of a release's programs, None: the PATH; skips the test where they cannot be had."""
    if release == "installed":
        return None
    script = Path(__file__).with_name(f"unpack_{release}.sh")
    made = subprocess.run([script], capture_output=True, text=True, timeout=1500, check=False)
    if made.returncode == 3:
        pytest.skip(made.stderr.strip()[-500:])
    assert made.returncode == 0, made.stderr
    return Path(made.stdout.strip()) / "bin"


@contextmanager
def cluster_of(release: str, **options: Any) -> "Iterator[SlurmCluster]":
    """Run a cluster in a folder whose name is short enough for a socket."""
    with (
        tempfile.TemporaryDirectory(prefix="sl", ignore_cleanup_errors=True) as folder,
        SlurmCluster(Path(folder), release, **options) as cluster,
    ):
        yield cluster


class SlurmCluster:
    """A cluster of ``n1``, ``n2``, …, or of nodes with these names, with GPUs that are clones of ``/dev/null``.

    ``root``: its folder. Unix sockets in it bear about 100 characters: keep it short.
    ``nodes``, ``gpus``: nodes, and GPUs of each. ``more``: further lines of its configuration.
    ``accounting``: with slurmdbd and a MariaDB.
    ``release``: of :data:`RELEASES`. ``settings``: those of predrain that name this cluster.
    """

    def __init__(
        self, root: Path, release: str, *, nodes: int | Sequence[str] = 2, gpus: int = 8, more: str = "",
        accounting: bool = False,
    ) -> None:  # fmt: skip
        self.root, self.release, self.gpus, self.more, self.accounting = root, release, gpus, more, accounting
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)] if isinstance(nodes, int) else list(nodes)
        programs = programs_of(release)
        path = _path() if programs is None else f"{programs}:{_path()}"
        self.settings: dict[str, Any] = {"slurm_conf": str(root / "slurm.conf"), "bin_dir": programs and str(programs)}
        self.environment = {**os.environ, "SLURM_CONF": str(root / "slurm.conf"), "PATH": path}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "SlurmCluster":
        try:
            self._lay_out()
            self._start_munge()
            if self.accounting:
                self._start_accounting()
            self.start_controller()
            for name in self.nodes:
                self.start_node(name)
            self.wait(lambda: set(self.states().values()) == {"idle"} and len(self.states()) == len(self.nodes))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, *command: str, check: bool = True) -> str:
        """Run a client command and return what it prints."""
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def states(self) -> dict[str, str]:
        """Return each node's state in Slurm's long form; empty while the controller does not respond."""
        try:
            return dict(line.split() for line in self.run("sinfo", "-h", "-N", "-o", "%N %T").splitlines())
        except RuntimeError:
            return {}

    def update(self, node: str, **settings: str) -> None:
        self.run("scontrol", "update", f"nodename={node}", *(f"{key}={value}" for key, value in settings.items()))

    def submit(self, *options: str, script: str) -> str:
        out = self.root / "out-%j"
        return self.run("sbatch", "--parsable", "-o", str(out), *options, "--wrap", script).strip()

    def node(self, name: str) -> list[str]:
        """Return a node's state, weight, extra and, out of service, its reason, as ``scontrol`` shows them."""
        shown = self.run("scontrol", "show", "node", name)
        fields = re.findall(r"\b(?:State|Weight)=\S+|\b(?:Reason|Extra)=.*", shown)
        if re.search(r"State=\S*(?:DRAIN|FAIL|DOWN)", shown):
            return fields
        return [field for field in fields if not field.startswith("Reason=")]  # 24.11 keeps that of an ended drain

    def job(self, number: str) -> dict[str, Any]:
        """Return a job of the controller's memory; its state is one word in each release."""
        jobs = json.loads(self.run("squeue", "--states=all", "--json"))["jobs"]
        job = next(job for job in jobs if str(job["job_id"]) == number)
        return job | {"job_state": "+".join(states_of(job["job_state"]))}

    def wait(self, ready: Callable[[], bool], timeout_s: float = 300.0) -> None:
        """Wait until something is so.

        Raises ``TimeoutError`` with the end of the controller's log.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() > deadline:
                log = self.root / "log" / "slurmctld.log"
                raise TimeoutError(log.read_text()[-2000:] if log.exists() else "the controller wrote no log")
            time.sleep(0.1)

    def start_controller(self) -> None:
        self._start("slurmctld", "slurmctld", "-D", "-f", str(self.root / "slurm.conf"))

    def wait_until_saved(self) -> None:
        """Wait until the controller has saved its nodes, as it does after a change; a kill loses the rest."""
        now = time.time()
        self.update(self.nodes[-1], weight="5")  # it is saved at once, or within seconds
        saved = self.root / "state" / "node_state"
        self.wait(lambda: saved.exists() and saved.stat().st_mtime > now)

    def start_node(self, name: str, *options: str) -> None:
        """Start a node's slurmd; ``-b`` reports a boot."""
        self._start(name, "slurmd", "-D", *options, "-N", name, "-f", str(self.root / "slurm.conf"))

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def stop(self) -> None:
        processes = list(reversed(self._processes.values()))
        self._processes.clear()
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, name: str, *command: str) -> None:
        self._processes[name] = subprocess.Popen(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _lay_out(self) -> None:
        for folder in ("state", "log", "run", *(f"spool/{n}" for n in self.nodes), *(f"dev/{n}" for n in self.nodes)):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o755)  # munge refuses a socket in a folder that others may not enter
        (self.root / "run").chmod(0o755)
        for name in ("munge.key", "jwt.key"):
            key = self.root / name
            key.write_bytes(os.urandom(128))
            key.chmod(0o600)
        controller, *ports = (free_port() for _ in range(len(self.nodes) + 1))
        listed = "\n".join(
            NODE.format(name=name, port=port, gpus=self.gpus) for name, port in zip(self.nodes, ports, strict=True)
        )
        host = socket.gethostname().split(".")[0]
        config = CONFIG.format(host=host, port=controller, root=self.root, nodes=listed) + self.more
        (self.root / "slurm.conf").write_text(config)
        resources = ["AutoDetect=off"]
        for name in self.nodes:
            for number in range(self.gpus):
                device = self.root / "dev" / name / f"nvidia{number}"
                try:
                    os.mknod(device, 0o20666, os.makedev(1, 3))
                except PermissionError:  # then Slurm counts them, and binds none
                    device.touch()
            files = f"{self.root}/dev/{name}/nvidia[0-{self.gpus - 1}]"
            resources.append(f"NodeName={name} Name=gpu Type=h100 File={files}")
        (self.root / "gres.conf").write_text("\n".join(resources) + "\n")

    def _start_accounting(self) -> None:
        database, port = free_port(), free_port()
        data = self.root / "db"
        data.mkdir()
        self._start(
            "mariadbd", "mariadbd", "--no-defaults", "--user=root", "--skip-grant-tables", f"--datadir={data}",
            f"--socket={self.root}/run/db.sock", f"--port={database}", "--bind-address=127.0.0.1",
        )  # fmt: skip
        self.wait(lambda: listens(database))
        config = self.root / "slurmdbd.conf"
        config.write_text(DBD_CONFIG.format(root=self.root, port=port, database=database))
        config.chmod(0o600)
        with (self.root / "slurm.conf").open("a") as file:
            file.write(ACCOUNTING.format(port=port, root=self.root))
        self._start("slurmdbd", "slurmdbd", "-D")
        self.wait(lambda: listens(port))
        self.run("sacctmgr", "-i", "add", "cluster", "t")

    def _start_munge(self) -> None:
        run = self.root / "run"
        self._start(
            "munged",
            "munged",
            "-F",
            f"--key-file={self.root}/munge.key",
            f"--socket={run}/munge.socket",
            f"--pid-file={run}/munged.pid",
            f"--log-file={self.root}/log/munged.log",
            f"--seed-file={run}/munged.seed",
            "--force",
            "--num-threads=2",
        )
        self.wait((run / "munge.socket").exists)
