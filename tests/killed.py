"""Functions run in processes of their own that may die anywhere; the imports are paid for once, not at each death."""

import multiprocessing
import os
from collections.abc import Callable, Iterable
from typing import Any

_PROCESSES = multiprocessing.get_context("forkserver")
# Modules that start no thread when they are imported, so that a fork of them is whole.
_PROCESSES.set_forkserver_preload(["pytest", "telemetry.staging.compaction", "serving.scores.writing"])


def exit_code_of(function: Callable[..., Any], *given: object, timeout: float = 300.0) -> int:
    """Run a function of a module in a new process, forked from a clean one, and give the process's exit code.

    ``function``: found by its module and name; usually ends in ``os._exit``.
    ``timeout``: seconds until the process is killed (and the code is -9).
    """
    process = _PROCESSES.Process(target=function, args=given)
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
    code = process.exitcode
    assert code is not None
    return code


def die_at(at: int, places: Iterable[tuple[Any, str]]) -> None:
    """Make this process die (code 9) before the call of that number, from 1 on, among those of the given functions.

    ``places``: where each function stands, and its name there; it is replaced for the rest of the process.
    """
    calls = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                os._exit(9)
            return function(*given, **named)

        return call

    for owner, name in places:
        setattr(owner, name, counted(getattr(owner, name)))
