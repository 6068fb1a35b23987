"""What the light scorer raises for a sound bundle that only the full one scores."""

from __future__ import annotations

from features.errors import InputError


class HeavyModelError(InputError):
    """A sound model that needs the library it was trained with."""

    def __init__(self, why: str, where: str) -> None:
        super().__init__(f"the light scorer does not score this model: {why}", where, "Score it with the full bundle.")
        self.why = why
