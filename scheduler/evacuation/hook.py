"""What the operator's own servers and commands are told, and how they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol

HookKind = Literal["done", "waiting", "failed", "refused", "timeout"]
STATES: Mapping[str, HookKind] = {"done": "done", "acknowledged": "done", "waiting": "waiting", "failed": "failed"}
"""What ``state`` in an answer may be for a request, beside the words of a diagnostic."""


@dataclass(frozen=True, slots=True)
class HookReply:
    """What a hook answered.

    ``kind``: ``done``; ``waiting``: it was understood and is on its way; it is to be asked again with the same key;
    ``failed``: it says that it cannot; ``refused``: it did not take the request; ``timeout``: nobody knows.
    ``content``: the JSON object that it answered with; empty where it gave none.
    ``again_at``: not before this, where it said so; aware.
    """

    kind: HookKind
    words: str = ""
    content: Mapping[str, Any] = field(default_factory=dict)
    again_at: datetime | None = None


class Hook(Protocol):
    """Something of the operator's that is told things. It may be called from several threads at once."""

    def tell(self, payload: Mapping[str, Any], key: str, url: str | None = None) -> HookReply:
        """Tell it, and give its answer; never raises for what it says.

        ``key``: idempotency key: the same for each repetition.
        """
        ...


def reply_of(kind: HookKind, words: str, content: Mapping[str, Any]) -> HookReply:
    """Make a reply; a ``state`` in the content that is one of :data:`STATES` says more than a status or exit code."""
    said = content.get("state")
    told = content.get("words")
    if kind in ("done", "waiting") and isinstance(said, str):
        kind = STATES.get(said, kind)
    return HookReply(kind, told[:500] if isinstance(told, str) and told else words, content)
