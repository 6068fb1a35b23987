"""Terminal output of all verbs: errors without tracebacks, progress on stderr, JSON; and rounds at an interval."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from telemetry.accounting import Accounting

LINE_S = 30.0
"""Interval of progress lines on stderr if it is not a terminal."""

FAILED = 1
"""Exit code of a verb that failed."""

EXTRAS = {
    "learners": ("joblib", "lightgbm", "numba", "shap", "sklearn", "skops", "threadpoolctl", "xgboost"),
    "registry": ("mlflow", "sqlalchemy"),
    "train": ("matplotlib",),
    "serve": ("fastapi", "jinja2", "markupsafe"),
    "act": ("prometheus_client",),
    "collect": ("cramjam", "google", "starlette", "uvicorn"),
    "kubernetes": ("kubernetes", "urllib3"),
    "nvml": ("pynvml",),
    "dask": ("dask", "distributed"),
}
"""Extras of the distribution, with the modules that they install."""

WRONG_PATHS = {
    FileNotFoundError: "Check the path; its folder must exist. ",
    IsADirectoryError: "Give a file, not a folder. ",
    NotADirectoryError: "Give a folder, not a file. ",
}
"""Hints for unusable paths."""


def printable(text: str, keep: str = "") -> str:
    """Escape control characters, such as newlines and terminal colours; ``keep``: characters not to escape."""
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


def fail(message: str) -> NoReturn:
    """Print an error on stderr and exit with 1."""
    sys.stderr.write(f"predrain: error: {printable(message, keep=chr(10))}\n")
    raise typer.Exit(FAILED)


@contextmanager
def reported() -> Iterator[None]:
    """Turn errors of users and their environment (bad input, full disk, Ctrl-C) into one line and exit code 1."""
    from foundation.errors import InputError

    try:
        yield
    except InputError as error:
        fail(str(error))
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`): discard what is still buffered.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None
    except OSError as error:
        file = error.filename2 or error.filename or "no file named"
        advice = next((text for kind, text in WRONG_PATHS.items() if isinstance(error, kind)), "")
        fail(f"{error.strerror or error} ({file}). {advice}Previous output is unchanged.")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        for extra, modules in EXTRAS.items():
            if missing in modules:
                fail(f"this needs the package {missing}, which is not installed. Run: pip install 'predrain[{extra}]'.")
        raise
    except KeyboardInterrupt:
        fail("interrupted. Previous output is unchanged. Run the same command again to continue.")


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr if it is a terminal, else a line every :data:`LINE_S` seconds.

    Yields: ``advance(done, total)``, in the units of the job.
    """
    if not sys.stderr.isatty():
        yield _Lines(title)
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (*rich.Progress.get_default_columns(), rich.MofNCompleteColumn())
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda n_done, total: bar.update(task, completed=n_done, total=total)


class Stages:
    """Progress of consecutive stages on stderr."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def begin(self, stage: str) -> Callable[[int, int], None]:
        """Show the next stage; return ``advance(done, total)``."""
        self._stack.close()
        return self._stack.enter_context(progress(stage))

    def __enter__(self) -> "Stages":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class _Lines:
    """Prints progress lines if stderr is not a terminal, as in a service's journal or in CI."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._started = self._reported = time.monotonic()
        self._first: int | None = None
        self._last = 0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._first is None or done < self._last:
            # work finished by an earlier run or a previous step must not count towards the rate
            self._started, self._first = now, done
        self._last = done
        if now - self._reported < LINE_S:
            return
        self._reported = now
        line = f"predrain: {self._title}: {done:,} of {total:,}"
        rate = (done - self._first) / max(now - self._started, 1e-9)
        if total > 0:
            line += f" ({done / total:.0%})"
        if rate > 0:
            remaining = timedelta(seconds=round(max(total - done, 0) / rate))
            line += f", {rate:,.0f}" if rate >= 10 else f", {rate:.2g}"
            line += f" a second, about {remaining} left"
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def print_json(content: Mapping[str, Any]) -> None:
    """Print a JSON object as one line."""
    sys.stdout.write(json.dumps(content, default=str, sort_keys=True) + "\n")
    sys.stdout.flush()


def show(result: dict[str, Any], *, as_json: bool, accounting: "Accounting | None" = None) -> None:
    """Print a verb's result: one JSON object, or one line per entry.

    ``accounting``: printed last as a table, or as the key ``accounting`` of the JSON.
    """
    if as_json:
        print_json(result if accounting is None else result | {"accounting": accounting.as_dict()})
        return
    width = max(map(len, result), default=0)
    for key, value in result.items():
        sys.stdout.write(f"{key:<{width}}  {_text_of(value)}\n")
    if accounting is not None:
        from telemetry.accounting import as_text

        sys.stdout.write(as_text(accounting))


def _text_of(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text_of(inner)}" for key, inner in value.items()) or "none"
    if isinstance(value, list):
        return "; ".join(map(_text_of, value)) or "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else printable(str(value))


def until_stopped(pause: timedelta | None) -> Iterator[int]:
    """Yield the number of each round, ``pause`` from start to start, until the process receives a stop signal.

    ``pause``: None: a single round.
    """
    from foundation.running import every, stop_on_signals

    if pause is None:
        yield 0
        return
    with stop_on_signals() as stopped:
        yield from every(pause.total_seconds(), stopped.wait)
