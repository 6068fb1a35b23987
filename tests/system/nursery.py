"""The command in forks of one process that has imported what it needs, so that imports are paid for once.

Each fork is the leader of a process group and has a time, an environment and output files of its own.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

# Not the client of Kubernetes, which reads KUBECONFIG when it is imported.
FORKS: Final = """
import json, os, signal, sys, traceback
import time_machine
import lightgbm, pandas, sklearn.ensemble, pipeline.matrix_stage, predrain.act.assembly, scheduler.controller.controller
import scheduler.file, scheduler.slurm.scheduler, serving.scores.writing
import telemetry.collect.openmetrics, telemetry.collect.tickets, telemetry.staging.compaction
from predrain.command import main
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, path in enumerate(asked["output"], start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), descriptor)
        os.environ.clear(), os.environ.update(asked["environment"])
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, asked["dies"])
        time_machine.travel(asked["now"]).start()
        sys.argv = ["predrain", *asked["words"]]
        code = 1
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    print(code, flush=True)
"""


class Nursery:
    """A process in a folder, of which each command is a fork."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder
        )

    def run(
        self,
        *words: object,
        now: float,
        environment: Mapping[str, str],
        output: tuple[Path, Path],
        dies: float = 0.0,
    ) -> int:
        """Run a command at a time and return its exit code, negative for a signal.

        ``output``: the files that get its standard output and error, which may be the same.
        ``dies``: SIGALRM ends the command after so many seconds; 0: never.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {
            "words": [*map(str, words)], "now": now, "environment": dict(environment), "dies": dies,
            "output": [*map(str, output)],
        }  # fmt: skip
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=60)
