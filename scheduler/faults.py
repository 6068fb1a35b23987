"""Failures on demand: what an adapter may meet at any call, for rehearsals and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FaultKind = Literal[
    "conflict", "refused", "timeout_before", "timeout_after", "unreadable", "crash_before", "crash_after"
]  # fmt: skip


class Crash(BaseException):
    """The process dies here. No handler of ordinary errors may catch it."""


@dataclass(slots=True)
class _Planned:
    kind: FaultKind
    call: str | None
    skip: int


class Faults:
    """Failures that are planned for calls to come.

    ``before`` means that the call had no effect, ``after`` that it had all of it and nobody was told.
    """

    def __init__(self) -> None:
        self._planned: list[_Planned] = []
        self.calls: list[str] = []

    def plan(self, kind: FaultKind, call: str | None = None, skip: int = 0) -> None:
        """Let a call fail: the next one, or after ``skip`` others; of one name only, where ``call`` is given."""
        self._planned.append(_Planned(kind, call, skip))

    def clear(self) -> None:
        """Let everything succeed again."""
        self._planned.clear()

    def meet(self, call: str) -> FaultKind | None:
        """Note a call; give how it is to fail."""
        self.calls.append(call)
        for each in self._planned:
            if each.call not in (None, call):
                continue
            if each.skip:
                each.skip -= 1
                continue
            self._planned.remove(each)
            return each.kind
        return None
