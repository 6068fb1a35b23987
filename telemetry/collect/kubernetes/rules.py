"""Rules that classify taints, conditions and Kubernetes events."""

import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from foundation.kubernetes.foreign_marks import catalogue
from foundation.settings import Section, read_settings
from telemetry.phrases import EventType, names_hardware

DEFAULTS: Final = Path(__file__).with_name("rules.yaml")
Place = Literal["cluster", "group", "rack", "nvlink_domain"]


class Rule(Section):
    """A rule, see rules.yaml; it has exactly one of ``taint``, ``condition`` and ``reason``."""

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
            raise ValueError("message requires reason")
        return self


class KubernetesRules(Section):
    """A rules file, see rules.yaml.

    ``prefix``: DNS prefix of predrain's taints, labels and annotations.
    ``labels``: node labels for each part of the location; omitted keys keep their default.
    """

    prefix: str = "predrain.io"
    rules: tuple[Rule, ...] = ()
    labels: dict[Place, list[str]] = Field(default_factory=dict)
    gpu_resources: tuple[str, ...] = ()
    slice_resources: tuple[str, ...] = ()
    slice_annotations: tuple[str, ...] = ()
    claim_drivers: tuple[str, ...] = ()

    def for_taint(self, key: str) -> Rule | None:
        """Return the rule for a taint; None if it is ignored."""
        rule = next((rule for rule in self.rules if rule.taint is not None and fnmatchcase(key, rule.taint)), None)
        return None if rule is None or rule.type == "ignore" else rule

    def for_condition(self, kind: str) -> Rule | None:
        """Return the rule for a node condition, which may have the type ``ignore``; None if there is none."""
        rules = ((rule, rule.condition) for rule in self.rules if rule.condition is not None)
        fits = (rule for rule, named in rules if fnmatchcase(kind, named) or kind.lower() == named.lower())
        rule = next(fits, _OF_HARDWARE if names_hardware(kind) else None)
        is_pattern = rule is not None and "*" in str(rule.condition) and "status" not in rule.model_fields_set
        if rule is not None and is_pattern and _GOOD_NAME.search(kind):
            return rule.model_copy(update={"status": "False"})
        return rule

    def for_event(self, kind: str, reason: str, message: str) -> tuple[Rule, dict[str, str]] | None:
        """Return the rule for a Kubernetes event (maybe of type ``ignore``) and its named groups; None without one."""
        for rule in self.rules:
            by_reason = rule.reason.fullmatch(reason) if rule.reason is not None and rule.kind == kind else None
            by_message = rule.message.search(message) if rule.message is not None else None
            if by_reason is None or (rule.message is not None and by_message is None):
                continue
            groups = by_reason.groupdict() | (by_message.groupdict() if by_message else {})
            named = {name: text for name, text in groups.items() if text}
            return rule, named
        return (_HARDWARE_EVENT, {}) if kind == "Node" and names_hardware(reason) else None

    def event_kinds(self) -> list[str]:
        """Return the kinds of objects whose Kubernetes events are watched."""
        return sorted({rule.kind for rule in self.rules if rule.reason is not None and rule.type != "ignore"})

    def is_gpu(self, resource: str) -> bool:
        """Return whether a resource counts full GPUs."""
        return resource in self.gpu_resources

    def is_slice(self, resource: str) -> bool:
        """Return whether a resource counts GPU slices."""
        return any(fnmatchcase(resource, pattern) for pattern in self.slice_resources)


_GOOD_NAME: Final = re.compile(
    r"(?i:(?<!un)(?<!not)(?:ready|health|healthy|available|ok|passed|operational|installed|loaded|online))$"
    r"|^(?i:(?!.*(?:error|fault|fail|problem|issue|alert|xid|dbe|correct|throttl|slowdown|brake|over|degrad|pending|reset"
    r"|hang|lost|missing|leak|maintenance|diag|drain|cordon|quarantine))"
    r".*(?<!in)(?<!dis)(?<!not)(?:present|active|enabled|configured|running|connected))$"
    r"|(?<=[a-zU])(?<!ang)(?<!ock)Up$|^No(?=[A-Z])|^Has(?:GPU|Gpu)s?$"
)
# For patterns without a status: of conditions with such a name, False is the faulty status, otherwise True.
_OF_HARDWARE: Final = Rule(condition="*", type="other")
_HARDWARE_EVENT: Final = Rule(reason=re.compile(".*"), type="other")


@cache
def default_rules() -> KubernetesRules:
    """Return the rules of rules.yaml, and rules that treat other tools' drain taints as drains."""
    base = read_settings(DEFAULTS, KubernetesRules, "rules")
    drains = tuple(
        Rule(taint=mark.taint, type="drain", code=mark.code, tool=mark.tool)
        for mark in catalogue()
        if mark.taint not in (None, "*") and mark.meaning != "starting"  # rules do not read values
    )
    return base.model_copy(update={"rules": drains + base.rules})


def load_rules(path: Path | None) -> KubernetesRules:
    """Load a rules file and append the defaults; None returns the defaults.

    Raises ``InputError`` if the file is missing, is not YAML, or has an unknown key or an invalid value.
    """
    base = default_rules()
    if path is None:
        return base
    user_rules = read_settings(path, KubernetesRules, "rules")
    overrides = {name: getattr(user_rules, name) for name in user_rules.model_fields_set}
    return base.model_copy(
        update=overrides | {"rules": user_rules.rules + base.rules, "labels": base.labels | user_rules.labels}
    )
