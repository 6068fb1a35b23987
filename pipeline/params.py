"""Parameters: merges and validates params.yaml and its overrides; errors suggest the closest valid name."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from features.config import DecisionSection, FeatureSection, LabelSection
from foundation.durations import Duration, format_duration
from foundation.errors import InputError
from foundation.settings import Section, first_problem, settings_content
from foundation.yaml import overlaid
from models.config import BacktestSection, ModelsSection, PromotionSection, ServingSection, TrainingSection
from policy.config import PolicyConfig
from telemetry.config import ChannelDeclaration, EventsSection, TelemetrySection

_NAMED = 3
"""Maximum number of differing parameters that a sentence names."""

_CONTROLLER = frozenset(field.name for field in dataclasses.fields(PolicyConfig))
"""Settings of ``policy`` that the controller checks (``scheduler.controller.settings``)."""

Origin = Sequence[tuple[Path, Mapping[str, Any]]]
"""Parameter files with their content."""


class SimulateSection(Section):
    """``simulate``: the fleet that ``make run`` and the prepare stage simulate if there is no dataset."""

    gpus: int = Field(default=512, ge=8)
    """GPUs of the demo fleet."""

    days: int = Field(default=120, ge=1)
    """Days of the demo dataset."""

    seed: int = 11
    """Seed of the demo fleet."""

    scenario: Literal["base", "drift", "epidemic", "noprecursor", "announced"] = "drift"
    """See ``predrain simulate --help``."""

    acceleration: float = Field(default=1.0, gt=0)
    """Factor on all failure rates, for enough incidents; shown in the report."""


class DataSection(Section):
    """``data``: where the prepare stage takes the dataset from."""

    dataset: str | None = None
    """Dataset of ``predrain import``; null: simulate the demo fleet."""


class ThresholdsSection(Section):
    """``policy.thresholds``: the lowest risk of each tier."""

    watch: float | None = Field(default=None, gt=0, le=1)
    """Risk at or above which a unit is ``watch``; null: the bundle's ([tiers](../scoring.md#tiers))."""

    elevated: float | None = Field(default=None, gt=0, le=1)
    """The same for ``elevated``."""

    high: float | None = Field(default=None, gt=0, le=1)
    """The same for ``high``."""

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        values = [value for value in (self.watch, self.elevated, self.high) if value is not None]
        if values != sorted(values):
            raise ValueError("a higher tier needs a higher risk: watch <= elevated <= high")
        return self


class PolicySection(Section):
    """``policy``: tiers of risk."""

    thresholds: ThresholdsSection = ThresholdsSection()

    @model_validator(mode="before")
    @classmethod
    def _of_the_controller(cls, content: Any) -> Any:
        """Ignore settings that only ``predrain act`` reads, so that one file can serve both."""
        if not isinstance(content, dict):
            return content
        return {key: value for key, value in content.items() if key == "thresholds" or key not in _CONTROLLER}


class Params(Section):
    """All parameters of a run, as ``params.yaml`` holds them."""

    seed: int = Field(default=42, ge=0, lt=1 << 32)
    """Random seed of all steps after the dataset."""

    simulate: SimulateSection = SimulateSection()
    data: DataSection = DataSection()
    telemetry: TelemetrySection = TelemetrySection()
    channels: dict[str, ChannelDeclaration] = Field(default_factory=dict)
    """Your own channels by name, with the following keys."""
    events: EventsSection = EventsSection()
    decision: DecisionSection = DecisionSection()
    labels: LabelSection = LabelSection()
    features: FeatureSection = FeatureSection()
    training: TrainingSection = TrainingSection()
    models: ModelsSection = ModelsSection()
    backtest: BacktestSection = BacktestSection()
    promotion: PromotionSection = PromotionSection()
    policy: PolicySection = PolicySection()
    serving: ServingSection = ServingSection()


def load_params(paths: Iterable[Path]) -> Params:
    """Read parameter files, later ones overriding earlier ones key by key, and validate the result.

    ``paths``: YAML files, or folders with a params.yaml; an empty iterable gives the defaults. Mappings merge; lists
    and scalars replace.
    Raises ``InputError`` if a file is missing or is not YAML, or has an unknown key or an invalid value; the error
    suggests the closest valid name.
    """
    files = [path / "params.yaml" if path.is_dir() else path for path in paths]
    origin = [(file, settings_content(file, "parameter") or {}) for file in files]
    merged: dict[str, Any] = {}
    for file, content in origin:
        if not isinstance(content, dict):
            problem = f"a {type(content).__name__} instead of sections"
            raise InputError(problem, str(file), "Write sections with keys, as params.yaml does.")
        merged = overlaid(merged, content)
    try:
        params = Params.model_validate(merged)
    except ValidationError as error:
        place, problem, advice = first_problem(error, Params)
        location = f"{_origin_of(tuple(place.split('.')), origin)}, parameter {place}"
        raise InputError(problem, location, advice or "Correct the value.") from None
    _check_multiples(params, origin)
    return params


def _origin_of(loc: tuple[str, ...], origin: Origin) -> str:
    """Return the last file that sets a parameter, or else its closest parent section."""
    for end in range(len(loc), 0, -1):
        for path, content in reversed(origin):
            if _holds(content, loc[:end]):
                return str(path)
    return "parameters"


def with_step(params: Params, step: timedelta, location: str) -> Params:
    """Return parameters with the step of the dataset or matrix at ``location``.

    Raises ``InputError`` if ``telemetry.step`` is set to another one, or a duration is no multiple of the step.
    """
    step_given = params.telemetry.step
    if step_given is not None and step_given != step:
        raise InputError(
            f"the dataset's step is {format_duration(step)}, but telemetry.step is {format_duration(step_given)}",
            location,
            "Leave telemetry.step out, or import the dataset again.",
        )
    params = params.model_copy(update={"telemetry": params.telemetry.model_copy(update={"step": step})})
    _check_multiples(params, ())
    return params


def _check_multiples(params: Params, origin: Origin) -> None:
    step = params.telemetry.step
    if step is None:
        return
    checked: list[tuple[str, Duration]] = [("decision.every", params.decision.every)]
    checked += [("features.windows", window) for window in params.features.windows]
    checked += [("features.peer_window", params.features.peer_window)]
    for name, value in checked:
        if value % step:
            raise InputError(
                f"{format_duration(value)} is not a multiple of telemetry.step ({format_duration(step)})",
                f"{_origin_of(tuple(name.split('.')), origin)}, parameter {name}",
                "Choose a multiple of the step.",
            )


def flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return parameters by dotted name, as in reports and MLflow."""
    flat: dict[str, str] = {}
    for key, value in content.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return flat


def differences(saved: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """List the parameters that differ, by dotted name, with both values."""
    return [
        f"{name} {saved.get(name, 'not given')}, not {current.get(name, 'given')}"
        for name in dict.fromkeys([*saved, *current])
        if saved.get(name) != current.get(name)
    ]


def name_some(differences: Sequence[str]) -> str:
    """Name the first parameters that differ and count the rest, for a sentence.

    >>> name_some(["seed 1, not 2"]), name_some(["a", "b", "c", "d", "e"])
    ('seed 1, not 2', 'a; b; c; and 2 more')
    """
    further = len(differences) - _NAMED
    return "; ".join(differences[:_NAMED]) + (f"; and {further} more" if further > 0 else "")


def _holds(params: Any, path: tuple[str, ...]) -> bool:
    for key in path:
        if not isinstance(params, Mapping) or key not in params:
            return False
        params = params[key]
    return True
