"""What the address of the fleet page asks for, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlencode

from serving.http.request import Request, unknown_name
from serving.http.strict_json import shown
from serving.scores.fleet import ALL_TIERS
from telemetry.receiving.problems import Refused

SHOWN: Final = ("nodes", "gpus")
SORT_KEYS: Final = ("risk", "name", "tier", "rack", "group", "age")
PAGE_SORTS: Final = tuple(sign + key for key in SORT_KEYS for sign in ("-", ""))
PAGE_SIZES: Final = (50, 100, 250, 1000)

_NAMES: Final = ("show", "q", "tier", "rack", "group", "sort", "offset", "limit")
LONGEST: Final = 200
"""Of a text in an address."""
_FARTHEST: Final = 10**7


@dataclass(frozen=True, slots=True)
class FleetQuery:
    """A view of the fleet.

    ``show``: ``nodes`` or ``gpus``.
    ``search``: words that must all be found.
    ``sort``: one of :data:`PAGE_SORTS`.
    """

    show: str = "nodes"
    search: str = ""
    tiers: tuple[str, ...] = ()
    rack: str = ""
    group: str = ""
    sort: str = "-risk"
    offset: int = 0
    limit: int = 100

    @classmethod
    def of(cls, request: Request) -> FleetQuery:
        """Read a request's query; parameters without a value count as absent, as forms send them.

        Raises ``Refused``: 400, if a parameter or its value is none of ours.
        """
        found = cls()
        for name, value in request.query(_NAMES):
            if len(value) > LONGEST:
                raise Refused(400, f"{name} is longer than {LONGEST} characters", "invalid")
            if value:
                found = replace(found, **_checked(name, value, found))
        return found

    def address(self, **changed: Any) -> str:
        """Return the address of this view with something changed; the first page unless ``offset`` is given."""
        asked = replace(self, **{"offset": 0, **changed})
        usual = FleetQuery()
        pairs = [("show", asked.show), ("q", asked.search), *(("tier", each) for each in asked.tiers)]
        pairs += [("rack", asked.rack), ("group", asked.group), ("sort", asked.sort)]
        pairs = [
            (name, value)
            for name, value in pairs
            if value and (name, value) not in (("show", usual.show), ("sort", usual.sort))
        ]
        pairs += [("offset", str(asked.offset))] if asked.offset else []
        pairs += [("limit", str(asked.limit))] if asked.limit != usual.limit else []
        return "/?" + urlencode(pairs) if pairs else "/"

    @property
    def narrowed(self) -> bool:
        """Whether it leaves anything out."""
        return bool(self.search or self.tiers or self.rack or self.group)


def _checked(name: str, value: str, before: FleetQuery) -> dict[str, Any]:
    if name == "tier":
        return {
            "tiers": tuple(dict.fromkeys((*before.tiers, *(_one(name, each, ALL_TIERS) for each in value.split(",")))))
        }
    if name == "offset":
        if not (value.isascii() and value.isdigit() and int(value) <= _FARTHEST):
            raise Refused(400, f"offset is {shown(value)}: give a whole number from 0 to {_FARTHEST}", "invalid")
        return {"offset": int(value)}
    if name == "limit":
        return {"limit": int(_one(name, value, tuple(map(str, PAGE_SIZES))))}
    if name == "q":
        return {"search": value}
    if name in ("show", "sort"):
        return {name: _one(name, value, SHOWN if name == "show" else PAGE_SORTS)}
    return {name: value}


def _one(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise Refused(400, unknown_name(value, known, name), "invalid")
    return value
