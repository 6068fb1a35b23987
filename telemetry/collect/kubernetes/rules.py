"""Rules that classify taints, conditions and Kubernetes events, and parsing of the XIDs and GPUs they name."""

import json
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from foundation.kubernetes.foreign_marks import catalogue
from foundation.settings import Section, read_settings
from telemetry.identity.devices import normalise_pci_bus_id
from telemetry.kernel_log.catalogue import GPU_UUID, KernelFinding, parse_xid_message
from telemetry.phrases import EventType, names_hardware

DEFAULTS: Final = Path(__file__).with_name("rules.yaml")
"""Default rules, in the format of a user's file."""

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
    ``defaults``: whether the default rules are appended; the first match applies.
    ``labels``: node labels for each part of the location; omitted keys keep their default.
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
        """Return the rule for a taint; None if it is ignored."""
        return self._first(lambda rule: rule.taint is not None and fnmatchcase(key, rule.taint))

    def for_condition(self, kind: str) -> Rule | None:
        """Return the rule for a node condition, which may have the type ``ignore``; None if there is none."""
        rules = ((rule, rule.condition) for rule in self.rules if rule.condition is not None)
        fits = (rule for rule, named in rules if fnmatchcase(kind, named) or kind.lower() == named.lower())
        rule = next(fits, None)
        if rule is None and self.defaults and names_hardware(kind):
            return _HEALTHY_WHEN_TRUE if _GOOD_NAME.search(kind) else _BAD_WHEN_TRUE
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
        hardware = self.defaults and kind == "Node" and names_hardware(reason)
        return (_HARDWARE_EVENT, {}) if hardware else None

    def event_kinds(self) -> list[str]:
        """Return the kinds of objects whose Kubernetes events are watched."""
        return sorted({rule.kind for rule in self.rules if rule.reason is not None and rule.type != "ignore"})

    def is_gpu(self, resource: str) -> bool:
        """Return whether a resource counts full GPUs."""
        return resource in self.gpu_resources

    def is_slice(self, resource: str) -> bool:
        """Return whether a resource counts GPU slices."""
        return any(fnmatchcase(resource, pattern) for pattern in self.slice_resources)

    def _first(self, fits: Callable[[Rule], bool]) -> Rule | None:
        rule = next((rule for rule in self.rules if fits(rule)), None)
        return None if rule is None or rule.type == "ignore" else rule


_GOOD_NAME: Final = re.compile(r"(?i:(?<!un)(?<!not)(?:ready|healthy|available|ok|passed|operational))$|^No(?=[A-Z])")
# For conditions without a rule: with such a name, False is the faulty status, otherwise True.
_BAD_WHEN_TRUE: Final = Rule(condition="*", type="other")
_HEALTHY_WHEN_TRUE: Final = Rule(condition="*", status="False", type="other")
_HARDWARE_EVENT: Final = Rule(reason=re.compile(".*"), type="other")


@cache
def default_rules() -> KubernetesRules:
    """Return the rules of rules.yaml, and rules that treat other tools' drain taints as drains."""
    base = read_settings(DEFAULTS, KubernetesRules, "rules")
    drains = tuple(
        Rule(taint=mark.taint, type="drain", code=mark.code, tool=mark.tool)
        for mark in catalogue()
        if mark.taint is not None and mark.meaning != "starting"
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
    if not user_rules.defaults:
        return user_rules
    given = {name: getattr(user_rules, name) for name in user_rules.model_fields_set}
    return base.model_copy(
        update=given | {"rules": user_rules.rules + base.rules, "labels": base.labels | user_rules.labels}
    )


_MAX_TEXT: Final = 16_384
_MAX_CODES: Final = 32
_PCI: Final = re.compile(
    r"\bPCI:\s*([0-9A-Fa-f]{1,8}(?::[0-9A-Fa-f]{1,4}){1,2}(?:\.[0-7])?)"
    r"|(?<![0-9A-Fa-f:-])([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.[0-7])?)(?![0-9A-Fa-f:])"
)
_SEGMENTS: Final = re.compile(r"(?=NVRM:)|\s*Recommended Action=")
# Start of a kernel message inside a longer one, and its end in NVSentinel's.
_NOT_A_CODE: Final = re.compile(
    rf"{GPU_UUID.pattern}|{_PCI.pattern}|\b(?:gpu|device|slot|index|minor|pid|count|times|link|port)s?[\s#:=_-]*\d+"
    r"|\d{4}-\d\d-\d\dT?[\d:.]*Z?|\b\d+\s*(?:times|errors?|gpus?|occurrences?)\b",
    re.IGNORECASE,
)
_LIST: Final = r"\d{1,3}(?!\d)(?:[\s,;/|&]+(?:and\s+)?(?:xid[\s:=#-]*)?\d{1,3}(?!\d))*"
_AFTER_XID: Final = re.compile(
    rf"(?:(?<!s)xids?|\bcodes?|errorcodes?)(?:[\s_-]?(?:critical|fatal|error|event|code|number)s?)*\D{{0,40}}?({_LIST})",
    re.IGNORECASE,
)
_ONLY_CODES: Final = re.compile(r"[\s\[({\"']*((?:\d{1,3}[\s,;/|\"'\])}]*)+)")


def xid_faults(name: str, reason: str, message: str) -> list[KernelFinding]:
    """Return a fault for each XID in a condition's or event's message, else in its reason, else in its name.

    Kernel messages (``NVRM: Xid (PCI:…): 79, …``) give code and GPU. Otherwise a code follows ``XID`` (``XID=79``,
    ``Xid79``, ``XIDs: 48, 79``, ``ErrorCode:79``), or the reason is a list of codes or a JSON object keyed by code.
    Repeated kernel messages are separate faults.
    """
    message, reason = message[:_MAX_TEXT], reason[:_MAX_TEXT]
    segments = [segment for segment in _SEGMENTS.split(message) if segment]
    kernel = [xid for xid in map(parse_xid_message, segments) if xid is not None]
    if kernel:
        return kernel
    faults = [KernelFinding("xid", code, None, *named_gpu(segment)) for segment in segments for code in _codes(segment)]
    if not faults:
        codes = _listed_codes(reason) or _codes(reason) or _codes(name) or _listed_codes(message)
        faults = [KernelFinding("xid", code, None, *named_gpu(message)) for code in codes]
    return list(dict.fromkeys(faults))[:_MAX_CODES]


def lost_gpus(message: str) -> list[KernelFinding]:
    """Return a fault for each GPU that a message names by PCI address."""
    return [KernelFinding("failure", pci_bus_id=address) for address in _addresses(message[:_MAX_TEXT])]


def named_gpu(text: str) -> tuple[str | None, str | None]:
    """Return UUID and PCI address in a text; None for each that occurs not at all or with several values."""
    uuids, addresses = list(dict.fromkeys(GPU_UUID.findall(text))), _addresses(text)
    return (uuids[0] if len(uuids) == 1 else None), (addresses[0] if len(addresses) == 1 else None)


def _addresses(text: str) -> list[str]:
    written = (with_prefix or bare for with_prefix, bare in _PCI.findall(text))
    return list(dict.fromkeys(filter(None, map(normalise_pci_bus_id, written))))


def _codes(text: str) -> list[str]:
    plain = _NOT_A_CODE.sub(" ", text)
    return list(dict.fromkeys(code for listed in _AFTER_XID.findall(plain) for code in _numbers(listed)))


def _listed_codes(text: str) -> list[str]:
    """Return the codes of a text that is a list of codes or a JSON object keyed by code."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        whole = _ONLY_CODES.fullmatch(text)
        return [] if whole is None else list(_numbers(whole[1]))
    if isinstance(content, dict):
        content = [key for key, present in content.items() if present]
    listed = content if isinstance(content, list) else [content]
    return [code for entry in listed if isinstance(entry, str | int) for code in _numbers(str(entry))]


def _numbers(text: str) -> Iterator[str]:
    return (str(int(number)) for number in re.findall(r"(?<!\d)\d{1,3}(?!\d)", text) if int(number))
