"""What the address of the fleet page asks for, checked."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from serving.http.schemas import Tier

LONGEST: Final = 200
"""Of a text in an address."""
PAGE_SIZES: Final = (50, 100, 250, 1000)

Text = Annotated[str, Field(max_length=LONGEST)]
PageSort = Literal["-risk", "risk", "-name", "name", "-tier", "tier", "-rack", "rack", "-group", "group", "-age", "age"]


def _split(value: object) -> object:
    texts = [part for text in value for part in str(text).split(",")] if isinstance(value, list) else value
    return list(dict.fromkeys(part for part in texts if part)) if isinstance(texts, list) else texts


def _number(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


class FleetQuery(BaseModel):
    """A view of the fleet; parameters without a value count as absent, as forms send them.

    ``search``: words that must all be found.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    show: Literal["nodes", "gpus"] = "nodes"
    search: Text = Field("", alias="q")
    tiers: Annotated[list[Tier], BeforeValidator(_split)] = Field(default_factory=list, alias="tier")
    rack: Text = ""
    group: Text = ""
    sort: PageSort = "-risk"
    offset: int = Field(0, ge=0, le=10**7)
    limit: Annotated[Literal[50, 100, 250, 1000], BeforeValidator(_number)] = 100

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value != ""} if isinstance(given, dict) else given

    def address(self, **changed: Any) -> str:
        """Return the address of this view with something changed; the first page unless ``offset`` is given."""
        asked = self.model_copy(update={"offset": 0, **changed})
        usual = FleetQuery()
        pairs = [("show", asked.show), ("q", asked.search), *(("tier", tier) for tier in asked.tiers)]
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
