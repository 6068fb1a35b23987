"""The base of every settings model."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of every section of params.yaml: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
