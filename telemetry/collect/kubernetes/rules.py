"""What to make of taints, conditions and Kubernetes events: rules that a user can put before the defaults."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from telemetry.collect.rules_file import read_rules
from telemetry.config import Section

DEFAULTS: Final = Path(__file__).with_name("rules.yaml")
"""The documented defaults, in the form of a user's file."""

EventType = Literal["xid", "failure", "repair", "replacement", "driver", "diagnostic", "drain", "other"]
Place = Literal["cluster", "group", "rack", "nvlink_domain"]


class Rule(Section):
    """One rule; it has exactly one of ``taint``, ``condition`` and ``reason``."""

    taint: str | None = None
    """Pattern of taint keys."""

    condition: str | None = None
    """Pattern of node condition types."""

    status: Literal["True", "False", "Unknown"] = "True"
    """Status in which a condition reports a problem."""

    reason: str | None = None
    """Regular expression of the whole reason of a Kubernetes event."""

    kind: str = "Node"
    """Kind of the object that a Kubernetes event is about."""

    message: str | None = None
    """Regular expression somewhere in the message of a Kubernetes event."""

    type: EventType | Literal["ignore"]
    """Type of our event."""

    code: Annotated[str, Field(min_length=1)] | None = None
    """Code of our event; None: see rules.yaml."""

    ended: EventType | None = None
    """Type of our event when a taint or condition goes."""

    @field_validator("reason", "message")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"{value!r} is no regular expression: {error}") from error
        return value

    @model_validator(mode="after")
    def _one_subject(self) -> Rule:
        if sum(each is not None for each in (self.taint, self.condition, self.reason)) != 1:
            raise ValueError("a rule needs exactly one of taint, condition and reason")
        if self.message is not None and self.reason is None:
            raise ValueError("message goes with reason")
        return self


class KubernetesRules(Section):
    """The whole file."""

    prefix: str = "predrain.io"
    """DNS prefix of our own taints, labels and annotations."""

    defaults: bool = True
    """Whether the default rules follow these."""

    rules: tuple[Rule, ...] = ()
    """First match counts."""

    labels: dict[Place, list[str]] = Field(default_factory=dict)
    """Labels of a node with its place; keys left out have the default."""

    gpu_resources: list[str] | None = None
    """Extended resources that are whole GPUs; None: the default."""

    slice_resources: list[str] | None = None
    """Patterns of extended resources that are parts of GPUs; None: the default."""

    claim_drivers: list[str] | None = None
    """Drivers of dynamic resource allocation whose devices are GPUs; None: the default."""

    def for_taint(self, key: str) -> Rule | None:
        """Return the rule for a taint; None: ignore it."""
        return self._first(lambda rule: rule.taint is not None and fnmatchcase(key, rule.taint))

    def for_condition(self, kind: str) -> Rule | None:
        """Return the rule for a node condition; None: ignore it."""
        return self._first(lambda rule: rule.condition is not None and fnmatchcase(kind, rule.condition))

    def for_event(self, kind: str, reason: str, message: str) -> tuple[Rule, dict[str, str]] | None:
        """Return the rule for a Kubernetes event and its named groups; None: ignore it."""
        groups: dict[str, str] = {}

        def fits(rule: Rule) -> bool:
            if rule.reason is None or rule.kind != kind:
                return False
            by_reason = re.fullmatch(rule.reason, reason)
            by_message = re.search(rule.message, message) if rule.message is not None else None
            if by_reason is None or (rule.message is not None and by_message is None):
                return False
            for match in (by_reason, by_message):
                groups.update({name: text for name, text in (match.groupdict() if match else {}).items() if text})
            return True

        rule = self._first(fits)
        return None if rule is None else (rule, groups)

    def event_kinds(self) -> list[str]:
        """Return the kinds of objects whose Kubernetes events are asked for."""
        return sorted({rule.kind for rule in self.rules if rule.reason is not None and rule.type != "ignore"})

    def is_gpu(self, resource: str) -> bool:
        """Whether a resource is whole GPUs."""
        return resource in (self.gpu_resources or ())

    def is_slice(self, resource: str) -> bool:
        """Whether a resource is parts of GPUs."""
        return any(fnmatchcase(resource, pattern) for pattern in self.slice_resources or ())

    def _first(self, fits: Any) -> Rule | None:
        rule = next((rule for rule in self.rules if fits(rule)), None)
        return None if rule is None or rule.type == "ignore" else rule


@cache
def default_rules() -> KubernetesRules:
    """Return the rules of rules.yaml."""
    return read_rules(DEFAULTS, KubernetesRules, Rule)


def load_rules(path: Path | None) -> KubernetesRules:
    """Read a rules file and put the defaults after it; None: the defaults alone.

    Raises ``InputError`` if the file is missing, is no YAML, or has an unknown key or a wrong value.
    """
    base = default_rules()
    if path is None:
        return base
    own = read_rules(path, KubernetesRules, Rule)
    if not own.defaults:
        return own
    return own.model_copy(
        update={
            "rules": own.rules + base.rules,
            "labels": base.labels | own.labels,
            **{
                name: getattr(base, name)
                for name in ("gpu_resources", "slice_resources", "claim_drivers")
                if getattr(own, name) is None
            },
        }
    )
