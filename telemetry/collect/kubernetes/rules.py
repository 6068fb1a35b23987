"""What to make of taints, conditions and Kubernetes events: rules that a user can put before the defaults."""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from foundation.kubernetes.foreign_marks import catalogue
from foundation.settings import Section, read_settings
from telemetry.phrases.classifier import EventType, names_hardware

DEFAULTS: Final = Path(__file__).with_name("rules.yaml")
"""The documented defaults, in the form of a user's file."""

Place = Literal["cluster", "group", "rack", "nvlink_domain"]


class Rule(Section):
    """One rule, as rules.yaml explains; it has exactly one of ``taint``, ``condition`` and ``reason``."""

    taint: str | None = None
    condition: str | None = None
    status: Literal["True", "False", "Unknown"] = "True"
    reason: re.Pattern[str] | None = None
    kind: str = "Node"
    message: re.Pattern[str] | None = None
    type: EventType | Literal["ignore"]
    code: Annotated[str, Field(min_length=1)] | None = None
    ended: EventType | None = None
    tool: str | None = None

    @model_validator(mode="after")
    def _one_subject(self) -> "Rule":
        if sum(subject is not None for subject in (self.taint, self.condition, self.reason)) != 1:
            raise ValueError("a rule needs exactly one of taint, condition and reason")
        if self.message is not None and self.reason is None:
            raise ValueError("message goes with reason")
        return self


class KubernetesRules(Section):
    """The whole file, as rules.yaml explains.

    ``prefix``: DNS prefix of predrain's taints, labels and annotations.
    ``defaults``: whether the default rules follow these, of which the first match counts.
    ``labels``: of a node's place; keys left out have the default.
    """

    prefix: str = "predrain.io"
    defaults: bool = True
    rules: tuple[Rule, ...] = ()
    labels: dict[Place, list[str]] = Field(default_factory=dict)
    gpu_resources: tuple[str, ...] = ()
    slice_resources: tuple[str, ...] = ()
    slice_annotations: tuple[str, ...] = ()
    claim_drivers: tuple[str, ...] = ()

    def for_taint(self, key: str) -> Rule | None:
        """Return the rule for a taint; None: ignore it."""
        return self._first(lambda rule: rule.taint is not None and fnmatchcase(key, rule.taint))

    def for_condition(self, kind: str) -> Rule | None:
        """Return the rule for a node condition, which may be to ignore it; None: there is none."""
        rules = ((rule, rule.condition) for rule in self.rules if rule.condition is not None)
        fits = (rule for rule, named in rules if fnmatchcase(kind, named) or kind.lower() == named.lower())
        rule = next(fits, None)
        if rule is None and self.defaults and names_hardware(kind):
            return _HEALTHY_WHEN_TRUE if _GOOD_NAME.search(kind) else _BAD_WHEN_TRUE
        return rule

    def for_event(self, kind: str, reason: str, message: str) -> tuple[Rule, dict[str, str]] | None:
        """Return the rule for a Kubernetes event, which may be to ignore it, and its named groups; None: none."""
        for rule in self.rules:
            by_reason = rule.reason.fullmatch(reason) if rule.reason is not None and rule.kind == kind else None
            by_message = rule.message.search(message) if rule.message is not None else None
            if by_reason is None or (rule.message is not None and by_message is None):
                continue
            groups = by_reason.groupdict() | (by_message.groupdict() if by_message else {})
            named = {name: text for name, text in groups.items() if text}
            return rule, named
        hardware = self.defaults and kind == "Node" and names_hardware(reason)
        return (_HARDWARE_EVENT, {}) if hardware else None

    def event_kinds(self) -> list[str]:
        """Return the kinds of objects whose Kubernetes events are asked for."""
        return sorted({rule.kind for rule in self.rules if rule.reason is not None and rule.type != "ignore"})

    def is_gpu(self, resource: str) -> bool:
        """Whether a resource is whole GPUs."""
        return resource in self.gpu_resources

    def is_slice(self, resource: str) -> bool:
        """Whether a resource is parts of GPUs."""
        return any(fnmatchcase(resource, pattern) for pattern in self.slice_resources)

    def _first(self, fits: Callable[[Rule], bool]) -> Rule | None:
        rule = next((rule for rule in self.rules if fits(rule)), None)
        return None if rule is None or rule.type == "ignore" else rule


_GOOD_NAME: Final = re.compile(r"(?i:(?<!un)(?<!not)(?:ready|healthy|available|ok|passed|operational))$|^No(?=[A-Z])")
# Of a condition that no rule names: bad is False then, otherwise True.
_BAD_WHEN_TRUE: Final = Rule(condition="*", type="other")
_HEALTHY_WHEN_TRUE: Final = Rule(condition="*", status="False", type="other")
_HARDWARE_EVENT: Final = Rule(reason=re.compile(".*"), type="other")


@cache
def default_rules() -> KubernetesRules:
    """Return the rules of rules.yaml, and that a taint by which another tool takes a node is a drain."""
    base = read_settings(DEFAULTS, KubernetesRules, "rules")
    drains = tuple(
        Rule(taint=mark.taint, type="drain", code=mark.code, tool=mark.tool)
        for mark in catalogue()
        if mark.taint is not None and mark.meaning != "starting"
    )
    return base.model_copy(update={"rules": drains + base.rules})


def load_rules(path: Path | None) -> KubernetesRules:
    """Read a rules file and put the defaults after it; None: the defaults alone.

    Raises ``InputError`` if the file is missing, is no YAML, or has an unknown key or a wrong value.
    """
    base = default_rules()
    if path is None:
        return base
    own = read_settings(path, KubernetesRules, "rules")
    if not own.defaults:
        return own
    given = {name: getattr(own, name) for name in own.model_fields_set}
    return base.model_copy(update=given | {"rules": own.rules + base.rules, "labels": base.labels | own.labels})
