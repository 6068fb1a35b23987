"""The catalogue of kernel messages about GPUs: ``messages.yaml``, and rules that a mapping adds to it."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from telemetry.dataset.schema import EVENT_TYPES
from telemetry.identity.pci import normalise_pci_bus_id
from telemetry.kernel_log.xid_message import DETAIL_LENGTH, GPU_UUID, KernelFinding, mentions_xid, parse_xid_message

BOOT: Final = "boot"
"""Code of ``other`` events: the node's kernel started."""

FALLEN_OFF: Final = "fallen_off_the_bus"
"""Code of ``failure`` events: a GPU is lost."""

_FILE: Final = Path(__file__).with_name("messages.yaml")
_ADDRESS = r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?"
_BEFORE_WORD: Final = 24
# A message begins at most so many characters before the first word of its driver: "[drm] [nvidia-drm]".
_OPEN_MODULE = "Open Kernel"


def _compiled(pattern: str) -> str:
    """Name the first address ``address``, further ones ``address2`` and so on: alternatives cannot share a name."""
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
    """A rule of the catalogue; the fields are explained in ``messages.yaml``."""

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
    """The rules for the messages of one driver, as ``messages.yaml`` explains."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    driver: str
    begins: list[str]
    words: list[str]
    quiet: bool = False
    rules: list[MessageRule]


class MessageCatalogue:
    """Finds messages of GPU drivers in text and reads them.

    ``added``: rules that come before the shipped ones.
    """

    def __init__(self, added: Iterable[MessageRule] = ()) -> None:
        self._added = [(re.compile(rule.pattern, re.DOTALL), rule) for rule in added]
        self._words = tuple(word for driver in drivers() for word in driver.words)
        begins = [begin for driver in drivers() for begin in driver.begins]
        self._begins = re.compile("|".join(begins).replace("<ADDRESS>", _ADDRESS))
        self._rules = [
            (tuple(driver.words), driver.quiet, [(re.compile(rule.pattern, re.DOTALL), rule) for rule in driver.rules])
            for driver in drivers()
        ]
        # A failing GPU says the same thousands of times.
        self.read: Callable[[str], KernelFinding | None] = functools.lru_cache(maxsize=1024)(self._read)
        """Read a message; None if no rule knows it."""

    def mentions(self, text: str) -> bool:
        """Whether a line may hold a message about a GPU."""
        for word in self._words:
            if word in text:
                return True
        return any(pattern.search(text) for pattern, _ in self._added)

    def start(self, text: str) -> int:
        """Return where a message about a GPU begins in a line; -1 if there is none."""
        before = text
        for word in self._words:
            if word in before:
                before = before[: before.index(word)]
        first = len(before)
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
        if mentions_xid(message):
            return KernelFinding("unclear")
        for words, _, rules in self._rules:
            if any(word in message for word in words):
                for pattern, rule in rules:
                    if match := pattern.search(message):
                        return _finding(rule, match, message)
        return None

    def is_driver(self, message: str) -> bool:
        """Whether a message that no rule knows is a GPU driver's, and not one of PCIe or the kernel."""
        match = self._begins.match(message)
        return match is not None and any(
            not quiet and any(word in match[0] for word in words) for words, quiet, _ in self._rules
        )


@functools.cache
def shipped() -> MessageCatalogue:
    """Return the catalogue without added rules."""
    return MessageCatalogue()


@functools.cache
def drivers() -> tuple[Driver, ...]:
    """Return the catalogue as the file has it."""
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
