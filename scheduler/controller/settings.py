"""Settings of the controller: interval, limits of a round, and length of the lease."""

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
    """How the controller works.

    ``interval``: from the beginning of one round to that of the next.
    ``lease``: for how long the lease is taken; it is prolonged when half of it is over. Longer than any single call.
    ``max_round_duration``: actions that a round has not started by then are left to the next one, because evidence
    ages.
    ``max_new_per_round``: new marks a round, at most; releases are not counted.
    ``retries``: how often a write is tried again after a conflict, each time on the node as re-read.
    ``max_score_lifetime``: from a score's decision time to its end, at most; one that claims to hold for longer is
    refused.
    """

    interval: PositiveTime = timedelta(minutes=1)
    lease: PositiveTime = timedelta(seconds=30)
    max_round_duration: PositiveTime = timedelta(minutes=1)
    max_new_per_round: NonNegativeInt = 100
    retries: NonNegativeInt = 2
    max_score_lifetime: PositiveTime = timedelta(days=7)


@checked(frozen=True, slots=True)
class ActSettings:
    """All settings of ``predrain act``.

    ``kubernetes``: for ``--scheduler kubernetes``.
    ``slurm``: for ``--scheduler slurm``, which needs it.
    """

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    controller: ControllerSettings = field(default_factory=ControllerSettings)
    evacuation: EvacuationSettings = field(default_factory=EvacuationSettings)
    kubernetes: KubernetesSettings = field(default_factory=KubernetesSettings)
    slurm: SlurmSettings | None = None

    def __post_init__(self) -> None:
        source, thresholds, twice = self.policy.thresholds_from, self.policy.thresholds, None
        if source == "costs" and thresholds.high is not None:
            twice = "policy.thresholds.high is"
        elif source == "scores" and thresholds != TierThresholds():
            twice = "policy.thresholds are"
        if twice:
            raise ValueError(f"{twice} given, and policy.thresholds_from is {source!r}: leave one of them out")


def _time(value: object) -> str:
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError(f"{value!r}: expected a text, a number or a time")


def read_settings(file: Path) -> ActSettings:
    """Read settings from YAML or JSON.

    ``file``: one section for each attribute of :class:`ActSettings`; what is left out has its default, durations are
    texts such as ``6h``.
    Raises ``InputError`` if the file is missing, is no YAML, or has an unknown key or a value out of range; names the
    place.
    """
    settings = _parsed(settings_content(file, "settings"), file)
    return replace(settings, policy=replace(settings.policy, budget=settings.policy.budget.with_fleet_limits()))


def read_scheduler_settings(file: Path) -> ActSettings:
    """Read only how the scheduler is reached: enough to stop and to release, whatever is wrong with the rest.

    Raises ``InputError`` if the file is missing, is no YAML, or these sections are wrong.
    """
    content = settings_content(file, "settings")
    known = content if isinstance(content, dict) else {}
    return _parsed({name: known[name] for name in ("kubernetes", "slurm") if name in known}, file)


def _parsed(content: Any, file: Path) -> ActSettings:
    try:
        # through JSON, so that what YAML makes of a time or a key is refused in the same words as any other value
        content = json.loads(json.dumps(content if content is not None else {}, default=_time))
        settings = object_of(ActSettings, content, "settings")
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InputError(str(error), str(file), "Correct the value.") from None
    assert isinstance(settings, ActSettings)
    return settings
