"""What a reader of tree models raises: a damaged file is an error, an unusual one is left to its library."""

from __future__ import annotations

from features.errors import InputError


class UnsupportedModelError(InputError):
    """A sound model that the compiled evaluator does not score, and its library does.

    ``why``: what it holds that is not supported, such as splits on categories.
    """

    def __init__(self, why: str, where: str) -> None:
        super().__init__(f"no compiled evaluator for this model: {why}", where, "Score it with its own library.")


def damaged(why: object, where: str) -> InputError:
    """Give the error for a file that is not what it should be."""
    lines = str(why).strip().splitlines()
    first = lines[0][:200] if lines else type(why).__name__
    return InputError(f"not a readable tree model: {first}", where, "Train the bundle again.")
