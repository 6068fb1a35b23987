"""Options shared by several verbs, and their parsing."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from foundation.http import Connection
    from foundation.place import Place
    from pipeline.dask_engine import DaskEngine
    from pipeline.params import Params
    from telemetry.accounting import Accounting

ParamsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--params",
        help="Parameter file; repeatable, later files override earlier ones. Default: ./params.yaml, if it exists.",
    ),
]

DATASET_HELP = "Dataset: a folder or s3://BUCKET/PREFIX."

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """Expand a verb's dataclass parameters, which group shared options, to one option per field."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: group for name, group in hints.items() if is_dataclass(group)}
    parameters: list[Parameter] = []
    for parameter in signature(verb).parameters.values():
        options: list[tuple[str, Any, Any]] = [(parameter.name, parameter.default, hints[parameter.name])]
        if parameter.name in groups:
            group = groups[parameter.name]
            types = get_type_hints(group, include_extras=True)
            options = [(field.name, field.default, types[field.name]) for field in fields(group)]
        parameters += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, default, annotation in options
        ]

    @wraps(verb)
    def call(**arguments: Any) -> None:
        option_groups = {
            name: group(**{field.name: arguments.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        verb(**arguments, **option_groups)

    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # what Typer reads
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Credentials and TLS settings of an HTTP connection."""

    bearer_token_file: Annotated[Path | None, typer.Option(help="File with a bearer token.")] = None
    basic_auth_file: Annotated[Path | None, typer.Option(help="File with user:password.")] = None
    ca_file: Annotated[Path | None, typer.Option(help="CA certificate (PEM).")] = None
    client_cert: Annotated[Path | None, typer.Option(help="Client certificate (PEM), for mutual TLS.")] = None
    client_key: Annotated[Path | None, typer.Option(help="Key of the client certificate (PEM).")] = None
    insecure_skip_verify: Annotated[bool, typer.Option("--insecure-skip-verify", help="Skip TLS verification.")] = False
    header: Annotated[
        list[str] | None,
        typer.Option(help="HTTP header NAME=VALUE, such as X-Scope-OrgID=hpc. Repeatable."),
    ] = None

    def to(self, url: str) -> "Connection":
        """Create a connection; raises ``InputError`` if an option is unusable, or options contradict each other."""
        from foundation.http import connect_to

        options = asdict(self)
        return connect_to(url, headers=options.pop("header") or (), **options)

    def to_prometheus(self, address: str) -> "Connection":
        """Create a connection to Prometheus; without credentials, the environment may name a token file."""
        from foundation.http import connect_to

        options, named = asdict(self), os.environ.get(PROMETHEUS_TOKEN_FILE)
        if named and self.bearer_token_file is None and self.basic_auth_file is None:
            options["bearer_token_file"] = Path(named)
        return connect_to(address, option="--prometheus", headers=options.pop("header") or (), **options)


def read_params(files: list[Path] | None) -> "Params":
    """Read the parameter files given, or ``params.yaml`` of the current folder if it exists; else the defaults."""
    from pipeline.params import load_params

    return load_params(params_files(files))


def params_files(files: list[Path] | None) -> list[Path]:
    """Return the parameter files that :func:`read_params` reads."""
    default = Path("params.yaml")
    return files or ([default] if default.is_file() else [])


def read_place(written: str, out: Path) -> "Place":
    """Parse the location of a dataset; raise ``InputError`` if it is invalid, or ``out`` is inside it or not local."""
    from foundation.place import place_of, refuse_storage

    refuse_storage(out)
    place = place_of(written)
    if isinstance(place, Path):
        refuse_inside(out, place)
    return place


def refuse_inside(out: Path, folder: Path, kind: str = "dataset") -> None:
    """Raise ``InputError`` if ``out`` is inside a dataset or matrix: the next import or build would replace it."""
    from foundation.errors import InputError

    if out.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{out} is inside the {kind} {folder}", "--out", f"Choose a folder outside the {kind}.")


def check_scores(folder: Path | None) -> None:
    """Raise ``InputError`` if ``--scores`` is a file or an unrelated folder; it may not exist yet."""
    from foundation.errors import InputError

    if folder is None or not folder.exists():
        return
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")} if folder.is_dir() else {"a file"}
    if names - {"lost+found"} and not names & {"latest.json", "status.json", "decisions"}:
        advice = "Give the folder that `predrain score --out` writes."
        raise InputError("not a folder of scores", f"--scores {folder}", advice)


def instant_option(written: str, option: str, now: datetime | None = None) -> datetime:
    """Parse an instant: ISO 8601 with an offset, a day (00:00 UTC), or an age.

    ``now``: reference of an age; default: the current time.
    Raises ``typer.BadParameter`` if it is none of these.
    """
    from datetime import UTC, date, datetime

    from foundation.durations import parse_duration

    try:
        return (now or datetime.now(UTC)) - parse_duration(written)
    except (ValueError, OverflowError):
        pass
    try:
        day = date.fromisoformat(written)
        return datetime(day.year, day.month, day.day, tzinfo=UTC)
    except ValueError:
        pass
    try:
        instant = datetime.fromisoformat(written)
    except ValueError:
        forms = "2026-03-01T12:00:00Z, 2026-03-01 (00:00 UTC), or 90d (that long ago)"
        raise typer.BadParameter(f"{written!r} is not a time: write {forms}", param_hint=option) from None
    if instant.tzinfo is None:
        raise typer.BadParameter(f"{written!r} has no time zone: add Z or an offset such as +01:00", param_hint=option)
    return instant


def duration_option(written: str, option: str, *, least: str = "0s") -> timedelta:
    """Parse a duration, e.g. 30s; raises ``typer.BadParameter`` if it is invalid or less than ``least``."""
    from foundation.durations import parse_duration

    try:
        duration = parse_duration(written)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
    if duration < parse_duration(least):
        raise typer.BadParameter(f"give at least {least}", param_hint=option)
    return duration


DEFAULT_STORE = "sqlite:///mlflow.db"

RegistryOption = Annotated[
    str | None,
    typer.Option("--registry", help=f"MLflow URI of the registry. Default: MLFLOW_TRACKING_URI, else {DEFAULT_STORE}."),
]

RecordOption = Annotated[
    str | None,
    typer.Option(
        "--registry", help="MLflow tracking URI for the run, such as sqlite:///mlflow.db. Default: not recorded."
    ),
]

ModelNameOption = Annotated[str, typer.Option("--name", help="Name of the registered model.")]


def store_uri(uri: str | None) -> str:
    """Return the MLflow URI: the given one, else the environment's, else a file in the current folder."""
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_STORE


PROMETHEUS, PROMETHEUS_TOKEN_FILE = "PREDRAIN_PROMETHEUS", "PREDRAIN_PROMETHEUS_TOKEN_FILE"
"""Environment variables: the URL of a Prometheus server, and a file with the token for this server only."""


def prometheus_address(url: str | None, *other_sources: object) -> str | None:
    """Return the URL of Prometheus: the given one, or the environment's if no other source is given."""
    return url or (None if any(other_sources) else os.environ.get(PROMETHEUS) or None)


class EngineName(StrEnum):
    """Execution engines."""

    local = "local"
    dask = "dask"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the execution engine."""

    engine: Annotated[
        EngineName, typer.Option(help="Execution engine: this process, or a Dask cluster (extra `dask`).")
    ] = EngineName.local
    dask_address: Annotated[
        str | None,
        typer.Option(help="Scheduler of a running Dask cluster with access to the same folders, tcp://HOST:PORT."),
    ] = None
    dask_workers: Annotated[
        int | None,
        typer.Option(min=1, help="Dask workers to start on this machine. Default: one per core."),
    ] = None

    @contextmanager
    def open_engine(self) -> "Iterator[DaskEngine | None]":
        """Yield the engine, and close it afterwards; None: this process. Reject contradictory options."""
        address, workers = self.dask_address, self.dask_workers
        if self.engine is EngineName.local and (address is not None or workers is not None):
            raise typer.BadParameter("--dask-address and --dask-workers require --engine dask")
        if address is not None and workers is not None:
            raise typer.BadParameter("give either --dask-address or --dask-workers")
        if self.engine is EngineName.local:
            yield None
            return
        from pipeline.dask_engine import DaskEngine

        with DaskEngine(address, workers) as engine:
            yield engine


DatasetOption = Annotated[
    Path,
    typer.Option("--dataset", help="Dataset; rows are staged in DATASET.live."),
]
IntervalOption = Annotated[str, typer.Option("--interval", help="Interval between rounds.")]
ListenOption = Annotated[
    str | None,
    typer.Option("--listen", help="Address of the collector's /metrics and /healthz, such as 127.0.0.1:9210."),
]
OnceOption = Annotated[bool, typer.Option("--once", help="Run one round, then exit.")]
RulesOption = Annotated[
    Path | None,
    typer.Option("--rules", help="Rules (YAML) for taints, conditions and events; they precede the defaults."),
]
SourceMappingOption = Annotated[
    Path | None,
    typer.Option("--mapping", help="Mapping file (YAML) for renamed metrics and labels."),
]


def seconds(written: str, option: str) -> float:
    """Parse a duration of at least a second; raises ``typer.BadParameter`` if it is invalid."""
    return duration_option(written, option, least="1s").total_seconds()


def log_to_stderr() -> None:
    """Log to stderr, from level INFO."""
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


@contextmanager
def collecting(accounting: "Callable[[], Accounting]", listen: str | None) -> Iterator[threading.Event]:
    """Yield an event that is set by a stop signal; until then, serve a collector's accounting on ``listen``."""
    from foundation.running import stop_on_signals
    from telemetry.collect.exposure import exposing

    log_to_stderr()
    with stop_on_signals() as stop, exposing(listen, accounting):
        yield stop
