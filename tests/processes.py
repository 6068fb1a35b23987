"""Our command, here or as a process of its own, and other programs."""

import contextlib
import http.client
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from predrain.command import app
from tests.waiting import free_port, wait

ROOT = Path(__file__).resolve().parents[1]
PREDRAIN = (sys.executable, "-c", "from predrain.command import main; main()")


def predrain(*arguments: object, cwd: Path = ROOT, code: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, which has to come with this code; ``more``: variables of its environment."""
    command, env = [*PREDRAIN, *map(str, arguments)], os.environ | {"COLUMNS": "200"} | more
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def invoke(*arguments: object, cwd: Path = Path(), code: int = 0, **more: str) -> Result:
    """Run the command to its end as :func:`predrain` does, but in this process, whose imports are paid for."""
    with contextlib.chdir(cwd):
        done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"} | more)
    assert done.exit_code == code, (done.output, done.exception)
    return done


def printed_by(code: str, *arguments: object, cwd: Path = ROOT, **more: str) -> str:
    """Run code in a new interpreter to its end, which has to come well, and give what it prints."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | more, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@contextlib.contextmanager
def running(
    command: Iterable[object], log: Path, *, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program until the block ends; what it writes goes to a file."""
    arguments = [str(word) for word in command]
    with log.open("ab") as stream:
        process = subprocess.Popen(
            arguments, stdout=stream, stderr=stream, start_new_session=True, cwd=cwd, env=env or os.environ
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(120)


_LEASE = """
    import fcntl, os, signal, sys
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fcntl.fcntl(os.open(sys.argv[1], os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_WRLCK)
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def hanging(file: Path) -> Iterator[None]:
    """Let the kernel hold back every ``open`` of a file until the block ends: another process has a lease on it."""
    command = [sys.executable, "-c", textwrap.dedent(_LEASE), str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            holder.kill()


@contextlib.contextmanager
def serving(folder: Path, *options: object, port: int | None = None) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run ``predrain serve`` on a folder's scores; gives the process and its port once it answers."""
    port, log = port or free_port(), folder / "log"
    command = [*PREDRAIN, "serve", "--scores", folder / "scores", "--listen", f"127.0.0.1:{port}", *options]
    with running(command, log, cwd=folder) as process:
        wait(lambda: process.poll() is not None or answers(port))
        assert process.poll() is None, log.read_text()[-3000:]
        yield process, port


def answers(port: int, path: str = "/healthz") -> bool:
    """Whether a service answers with 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
