"""Running another program for what it prints: never without a time limit, and again a few times where it fails."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from telemetry.collect.running import backoff_s

Run = Callable[[Sequence[str]], str]
"""Runs a program and returns what it prints; :class:`CommandError` where it fails."""

_LASTING: Final = ("unrecognized option", "invalid option", "accounting storage is")


class CommandError(Exception):
    """A program that failed.

    ``lasting``: trying again will not help: the program is not there, or does not know an option.
    """

    def __init__(self, command: Sequence[str], why: str, *, lasting: bool = False) -> None:
        super().__init__(command, why)
        self.command = " ".join(command)
        self.why = why
        self.lasting = lasting

    def __str__(self) -> str:
        return f"`{self.command}`: {self.why}"


def run_command(
    command: Sequence[str],
    *,
    timeout_s: float = 60.0,
    attempts: int = 3,
    sleep: Callable[[float], object],
    environment: Mapping[str, str] | None = None,
) -> str:
    """Return what a program prints on stdout.

    ``timeout_s``: for each attempt.
    ``attempts``: from 1.
    Raises ``CommandError`` if the last attempt failed too.
    """
    for attempt in range(1, attempts + 1):
        try:
            return _once(command, timeout_s, environment or {})
        except CommandError as error:
            if error.lasting or attempt == attempts:
                raise
            sleep(backoff_s(attempt))
    raise AssertionError("attempts is at least 1")


def _once(command: Sequence[str], timeout_s: float, environment: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - no shell; the programs are named by us or by the operator
            list(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired:
        raise CommandError(command, f"no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise CommandError(command, error.strerror or str(error), lasting=True) from None
    if done.returncode != 0:
        said = " ".join(done.stderr.decode("utf-8", errors="replace").split())
        why = said[:300] or f"exit status {done.returncode}"
        raise CommandError(command, why, lasting=any(word in said.lower() for word in _LASTING))
    return done.stdout.decode("utf-8", errors="replace")
