"""Settings of the controller and the settings file of ``predrain act``."""

import json
from dataclasses import field, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt
from pydantic.dataclasses import dataclass as checked

from foundation.errors import InputError
from foundation.settings import PositiveTime, settings_content
from policy.config import PolicyConfig
from policy.tiers import TierThresholds
from scheduler.evacuation.settings import EvacuationSettings
from scheduler.kubernetes.settings import KubernetesSettings
from scheduler.ports.codec import object_of
from scheduler.slurm.settings import SlurmSettings


@checked(frozen=True, slots=True)
class ControllerSettings:
    """Settings of the controller; see settings.md."""

    interval: PositiveTime = timedelta(minutes=1)
    lease: PositiveTime = timedelta(seconds=30)
    max_round_duration: PositiveTime = timedelta(minutes=1)
    max_new_per_round: NonNegativeInt = 100
    retries: NonNegativeInt = 2
    max_score_lifetime: PositiveTime = timedelta(days=7)


@checked(frozen=True, slots=True)
class ActSettings:
    """All settings of ``predrain act``; ``slurm`` is required with ``--scheduler slurm``."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    controller: ControllerSettings = field(default_factory=ControllerSettings)
    evacuation: EvacuationSettings = field(default_factory=EvacuationSettings)
    kubernetes: KubernetesSettings = field(default_factory=KubernetesSettings)
    slurm: SlurmSettings | None = None

    def __post_init__(self) -> None:
        source, thresholds, repeated = self.policy.thresholds_from, self.policy.thresholds, None
        if source == "costs" and thresholds.high is not None:
            repeated = "policy.thresholds.high is"
        elif source == "scores" and thresholds != TierThresholds():
            repeated = "policy.thresholds are"
        if repeated:
            raise ValueError(f"{repeated} given, and policy.thresholds_from is {source!r}: leave one of them out")


def _time(value: object) -> str:
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError(f"{value!r}: expected a text, a number or a time")


def read_settings(file: Path) -> ActSettings:
    """Read settings from YAML or JSON.

    ``file``: one section for each attribute of :class:`ActSettings`; missing keys have defaults, durations are strings
    like ``6h``.
    Raises ``InputError`` with the location if the file is missing or not YAML, or a key or value is invalid.
    """
    settings = _parsed(settings_content(file, "settings"), file)
    return replace(settings, policy=replace(settings.policy, budget=settings.policy.budget.with_fleet_limits()))


def read_scheduler_settings(file: Path) -> ActSettings:
    """Read only the sections ``kubernetes`` and ``slurm``: enough to stop and to release if other sections are invalid.

    Raises ``InputError`` if the file is missing or not YAML, or these sections are invalid.
    """
    content = settings_content(file, "settings")
    known = content if isinstance(content, dict) else {}
    return _parsed({name: known[name] for name in ("kubernetes", "slurm") if name in known}, file)


def _parsed(content: Any, file: Path) -> ActSettings:
    try:
        # through JSON, so that YAML's own types (times, keys) give the same error messages as any other value
        content = json.loads(json.dumps(content if content is not None else {}, default=_time))
        settings = object_of(ActSettings, content, "settings")
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InputError(str(error), str(file), "Correct the value.") from None
    assert isinstance(settings, ActSettings)
    return settings
