"""Catalogue of kernel messages about GPUs: ``messages.yaml``, rules added by a mapping, and XIDs.

The format of XID messages varies by driver version: an optional ``PCI:`` before the address, the GPU's UUID, a MIG
instance (``GPU-I:05``), ``pid=`` and ``name=`` before the text. The NVLink 5 codes 144 to 150 carry a sub-code, a
severity and a link that determine the meaning.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from telemetry.dataset.event import EVENT_TYPES
from telemetry.identity.devices import normalise_pci_bus_id

GPU_UUID: Final = re.compile(r"(?i:GPU)-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
DETAIL_LENGTH: Final = 400  # characters
_NVLINK5 = range(144, 151)
_MESSAGE = re.compile(r"NVRM:\s*Xid\s*\((?P<place>[^)]*)\)\s*:\s*(?P<code>\d{1,9})\b(?P<rest>.*)", re.DOTALL)
_MENTION = re.compile(r"NVRM:.*\bXid\b")
_XID_ADDRESS = re.compile(r"(?:[0-9a-fA-F]{1,8}:)?[0-9a-fA-F]{1,2}:[0-9a-fA-F]{1,2}(?:\.[0-7])?")
_PROCESS = re.compile(r"pid=(?P<pid>[^,]*)(?:,\s*name=(?P<name>[^,]*))?(?:,\s*|$)")
_LINK = re.compile(r"(?P<sub>[A-Z][A-Z0-9_/]*)\s+(?P<severity>Fatal|Nonfatal)\b(?:.*?\bLink\s+(?P<link>-?\d+))?")
_RECOVERY = re.compile(
    r"recovery action changed from (?P<old>0x[0-9a-fA-F]+) \((?P<was>[^)]*)\) "
    r"to (?P<new>0x[0-9a-fA-F]+) \((?P<now>[^)]*)\)"
)


class KernelFinding(NamedTuple):
    """A classified message; ``type`` is empty without an event, ``unclear`` for an XID without a number or GPU.

    ``gpu``: UUID, if the message has it.
    ``repeat_window_s``: repetitions for one GPU within this time are one event.
    ``known``: ignored unless the log has identified the device as a GPU.
    """

    type: str
    code: str = ""
    detail: str | None = None
    gpu: str | None = None
    pci_bus_id: str | None = None
    part: str = ""
    repeat_window_s: int = 0
    known: bool = False


def parse_xid_message(message: str) -> KernelFinding | None:
    """Parse an XID message, with any prefix before ``NVRM:``; None if it has no code or no GPU.

    ``detail`` is the text without the process; for 144 to 150 it is sub-code, severity and link
    (``NETIR_LINK_EVT Fatal link 00``), for 154 the recovery action.
    """
    match = _MESSAGE.search(message)
    if match is None:
        return None
    place = match["place"]
    uuid = GPU_UUID.search(place)
    address = _XID_ADDRESS.search(place[: uuid.start()] + place[uuid.end() :] if uuid else place)
    bus = normalise_pci_bus_id(address[0]) if address else None
    if bus is None and uuid is None:
        return None
    code = str(int(match["code"]))
    tail = match["rest"].strip().lstrip(",").strip()
    return KernelFinding("xid", code, _detail(int(code), tail), uuid[0] if uuid else None, bus)


def _detail(code: int, tail: str) -> str | None:
    process = _PROCESS.match(tail)
    text = tail[process.end() :] if process else tail
    if code in _NVLINK5:
        link = _LINK.match(text)
        if link is not None:
            return f"{link['sub']} {link['severity']}" + (f" link {link['link']}" if link["link"] else "")
    if code == 154:
        action = _RECOVERY.search(text)
        if action is not None:
            return f"recovery action {action['now']} ({action['new']}), was {action['was']} ({action['old']})"
    if process and not text:
        name = f", name={process['name']}" if process["name"] else ""
        text = f"pid={process['pid']}{name}"
    return text[:DETAIL_LENGTH] or None


BOOT: Final = "boot"
"""Code of ``other`` events for a node boot."""

FALLEN_OFF: Final = "fallen_off_the_bus"
"""Code of ``failure`` events for a lost GPU."""

_FILE: Final = Path(__file__).with_name("messages.yaml")
_ADDRESS = r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?"
_BEFORE_WORD: Final = 24
# Maximum distance from the start of a message to the first of its driver's ``words``: "[drm] [nvidia-drm]".
_OPEN_MODULE = "Open Kernel"


def _compiled(pattern: str) -> str:
    """Expand the placeholders; addresses become ``address``, ``address2`` and so on, as group names must be unique."""
    for number in range(1, pattern.count("<ADDRESS>") + 1):
        name = "address" if number == 1 else f"address{number}"
        pattern = pattern.replace("<ADDRESS>", f"(?P<{name}>{_ADDRESS})", 1)
    pattern = pattern.replace("<UUID>", f"(?P<uuid>{GPU_UUID.pattern})", 1)
    try:
        re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


class MessageRule(BaseModel):
    """A rule of the catalogue; ``messages.yaml`` documents the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pattern: Annotated[str, AfterValidator(_compiled)]
    type: str = ""
    code: str = ""
    detail: str | None = None
    part: Literal["", "begin", "middle", "end"] = ""
    again: int = 0
    known: bool = False
    meaning: str = ""
    example: str = ""

    @model_validator(mode="after")
    def _is_complete(self) -> "MessageRule":
        if self.type not in ("", "unclear", *EVENT_TYPES):
            raise ValueError(f"unknown event type {self.type!r}: use one of {', '.join(EVENT_TYPES)}")
        if self.type not in ("", "unclear") and not self.code:
            raise ValueError("an event needs a code")
        return self


class Driver(BaseModel):
    """Message rules of one driver; the fields are explained in ``messages.yaml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    driver: str
    begins: list[str]
    words: list[str]
    quiet: bool = False
    rules: list[MessageRule]


class MessageCatalogue:
    """Finds and classifies messages of GPU drivers; rules in ``added`` take precedence over the shipped ones."""

    def __init__(self, added: Iterable[MessageRule] = ()) -> None:
        self._added = [(re.compile(rule.pattern, re.DOTALL), rule) for rule in added]
        self._words = tuple(word for driver in drivers() for word in driver.words)
        begins = [begin for driver in drivers() for begin in driver.begins]
        self._begins = re.compile("|".join(begins).replace("<ADDRESS>", _ADDRESS))
        self._rules = [
            (tuple(driver.words), driver.quiet, [(re.compile(rule.pattern, re.DOTALL), rule) for rule in driver.rules])
            for driver in drivers()
        ]
        # A failing GPU repeats a message thousands of times.
        self.read: Callable[[str], KernelFinding | None] = functools.lru_cache(maxsize=1024)(self._read)
        """Classify a message; None if no rule matches."""

    def mentions(self, text: str) -> bool:
        """Whether a line may contain a message about a GPU."""
        for word in self._words:
            if word in text:
                return True
        return any(pattern.search(text) for pattern, _ in self._added)

    def start(self, text: str) -> int:
        """Return the offset of a message about a GPU in a line, or -1."""
        prefix = text
        for word in self._words:
            if word in prefix:
                prefix = prefix[: prefix.index(word)]
        first = len(prefix)
        match = self._begins.search(text, max(first - _BEFORE_WORD, 0)) if first < len(text) else None
        if match is not None and not self._added:
            return match.start()
        starts = [] if match is None else [match.start()]
        starts += [added.start() for pattern, _ in self._added if (added := pattern.search(text))]
        return min(starts, default=-1)

    def _read(self, message: str) -> KernelFinding | None:
        for pattern, rule in self._added:
            if match := pattern.search(message):
                return _finding(rule, match, message)
        if xid := parse_xid_message(message):
            return xid
        if _MENTION.search(message):
            return KernelFinding("unclear")
        for words, _, rules in self._rules:
            if any(word in message for word in words):
                for pattern, rule in rules:
                    if match := pattern.search(message):
                        return _finding(rule, match, message)
        return None

    def is_driver(self, message: str) -> bool:
        """Whether a message without a matching rule comes from a GPU driver, not from PCIe or the kernel."""
        match = self._begins.match(message)
        return match is not None and any(
            not quiet and any(word in match[0] for word in words) for words, quiet, _ in self._rules
        )


@functools.cache
def shipped() -> MessageCatalogue:
    """Return the shipped catalogue, without added rules."""
    return MessageCatalogue()


@functools.cache
def drivers() -> tuple[Driver, ...]:
    """Load ``messages.yaml``."""
    return tuple(Driver.model_validate(part) for part in yaml.safe_load(_FILE.read_text(encoding="utf-8")))


def _finding(rule: MessageRule, match: re.Match[str], message: str) -> KernelFinding:
    groups: Mapping[str, Any] = {name: text.strip() for name, text in match.groupdict().items() if text is not None}
    addresses = (groups.get(name) for name in ("address", "address2", "address3"))
    address = next((text for text in addresses if text), None)
    if rule.type == "driver":
        detail: str | None = "open kernel module" if _OPEN_MODULE in message else None
    elif rule.detail is not None:
        detail = rule.detail.format_map(groups)[:DETAIL_LENGTH]
    else:
        detail = message[:DETAIL_LENGTH] if rule.type else None
    return KernelFinding(
        rule.type,
        rule.code.format_map(groups) if rule.type != "unclear" else "",
        detail,
        groups.get("uuid"),
        normalise_pci_bus_id(address) if address else None,
        rule.part,
        rule.again,
        rule.known,
    )
