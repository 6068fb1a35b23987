"""The controller's settings: how often, how much at once, and for how long it holds the lease."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Final

import yaml

from foundation.errors import InputError
from foundation.yaml import read_yaml
from policy.config import PolicyConfig
from policy.ranges import NonNegativeInt, PositiveTime, RangeChecked
from policy.tiers import TierThresholds
from scheduler.evacuation.settings import EvacuationSettings
from scheduler.kubernetes.settings import KubernetesSettings
from scheduler.ports.codec import object_of
from scheduler.slurm.settings import SlurmSettings

_EXEC = "Leave it out: let pods ask by annotation or webhook, or run kubectl exec from evacuation.checkpoint.command."
_NEXT_ROUND = "Leave it out: who gave no answer is told again in the next round."


@dataclass(frozen=True, slots=True)
class ControllerSettings(RangeChecked):
    """How the controller works.

    ``interval``: from the beginning of one round to that of the next.
    ``lease``: for how long the lease is taken; it is prolonged when half of it is over. Longer than any single call.
    ``max_round_duration``: what a round has not begun by then is left to the next one, for its evidence grows old.
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


@dataclass(frozen=True, slots=True)
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


REMOVED: Final[Mapping[str, str]] = {
    "kubernetes.nvsentinel_socket": "Leave it out: NVSentinel reads the node condition (nvsentinel-values.yaml).",
    "kubernetes.checkpoint_exec": _EXEC,
    "kubernetes.checkpoint_container": _EXEC,
    "kubernetes.checkpoint_exec_timeout": _EXEC,
    "policy.hysteresis.rise_dwell": "Leave it out: rise_after alone says when a tier rises.",
    "policy.node_risk.slope": "Leave it out: give thresholds on the risks as they are.",
    "policy.node_risk.intercept": "Leave it out: give thresholds on the risks as they are.",
    "evacuation.most_going_node": "Leave it out: max_concurrent bounds the whole fleet.",
    "evacuation.wait_for_end": "Leave it out: policy.cost_benefit.may_wait says whether jobs may end by themselves.",
    "evacuation.escalation": 'Leave it out, and alert on predrain_act_evacuation_steps_total{verb="tell"}.',
    "evacuation.checkpoint.webhook.attempts": _NEXT_ROUND,
    "evacuation.verification.webhook.attempts": _NEXT_ROUND,
    "evacuation.checkpoint.webhook.hosts": "Leave it out: workloads are asked through the url of the settings.",
}
"""What to do instead, by the dotted name of a setting that is gone."""

RENAMED: Final[Mapping[str, Mapping[str, str]]] = {
    "policy": {"tiers": "thresholds", "worth": "cost_benefit"},
    "policy.budget": {"floors": "disruption_budgets", "rates": "rate_limits"},
    "policy.budget.disruption_budgets": {
        "most": "max_unavailable", "most_share": "max_unavailable_share", "keep": "min_available",
        "ignore_below": "min_scope_size",
    },
    "policy.budget.rate_limits": {"most": "max_nodes", "most_share": "max_share"},
    "policy.breaker": {
        **{f"most_{end}": f"max_{end}" for end in ("risky", "missing", "down", "unreadable", "changed", "shrunk")},
        "most_model_age": "max_model_age", "most_read_age": "max_read_age", "least_jump": "min_jump",
        "least_risky": "min_risky", "least_history": "min_history",
    },
    "policy.stages": {
        "least_outcomes": "min_outcomes", "most_inconclusive": "max_inconclusive", "least_time": "min_time",
    },
    "controller": {"every": "interval", "most_time": "max_round_duration", "most_new": "max_new_per_round"},
    "evacuation": {
        "most_time": "max_round_duration", "most_going": "max_concurrent", "retry_first": "retry_initial_delay",
        "retry_most": "retry_max_delay",
    },
    "evacuation.checkpoint": {"wait": "timeout", "most_wait": "max_timeout", "otherwise": "default"},
    "evacuation.verification": {
        "by": "method", "patience": "timeout", "repeat": "retry_after", "again_after": "valid_for", "keep": "retention",
    },
    "kubernetes": {
        "patience": "retry_timeout", "node_page": "node_page_size", "pod_page": "pod_page_size",
        "evict": "eviction_scope", "jobs": "read_pods",
    },
    "slurm": {
        "bin": "bin_dir", "conf": "slurm_conf", "rest": "rest_url", "hard": "hard_state",
        "most_bytes": "max_response_bytes", "opt_out": "opt_out_feature", "group": "group_prefix",
        "rack": "rack_prefix", "domain": "domain_prefix",
    },
}  # fmt: skip
"""New names of settings by the old ones, for each section."""


def _old_names(content: Any, above: str = "", now_above: str = "") -> Iterator[tuple[str, str]]:
    """Find settings that were removed or renamed, and what to do; the items of a list count as one section."""
    for item in content if isinstance(content, list) else [content]:
        for key, value in item.items() if isinstance(item, Mapping) else ():
            new = RENAMED.get(now_above, {}).get(key)
            name, now = (f"{section}.{last}".lstrip(".") for section, last in ((above, key), (now_above, new or key)))
            if name in REMOVED:
                yield f"the setting {name} was removed", REMOVED[name]
            elif new:
                yield f"the setting {name} is now {now}", f"Write {now}."
            yield from _old_names(value, name, now)


def _refuse_old_names(content: Any, file: Path) -> None:
    gone = dict(_old_names(content))
    if len(gone) == 1:
        what, hint = gone.popitem()
        raise InputError(what, str(file), hint)
    if gone:
        listed = "".join(f"\n  {what}. {hint}" for what, hint in gone.items())
        raise InputError(f"{len(gone)} settings were removed or renamed", str(file), f"Change them:{listed}")


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
    try:
        content = read_yaml(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("the file of settings does not exist", str(file), "Give the path of a YAML file.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"the settings cannot be read: {error}", str(file), "Give a file of YAML.") from None
    try:
        # through JSON, so that what YAML makes of a time or a key is refused in the same words as any other value
        content = json.loads(json.dumps(content if content is not None else {}, default=_time))
        _refuse_old_names(content, file)
        settings = object_of(ActSettings, content, "settings")
    except (ValueError, TypeError) as error:
        raise InputError(str(error), str(file), "Correct the value.") from None
    assert isinstance(settings, ActSettings)
    return replace(settings, policy=replace(settings.policy, budget=settings.policy.budget.with_fleet_limits()))
