"""Random histories of a world: steps drawn from a seed; of one that fails, the fewest steps that fail are named."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, ClassVar

SEED, COUNT = os.environ.get("SEED", ""), int(os.environ.get("HISTORIES", "20000"))
BLOCK = 500
Steps = Sequence[tuple[str, float]]


def step(weight: int = 1) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a method as something that may happen, so often as its weight."""

    def marked(call: Callable[..., None]) -> Callable[..., None]:
        call.weight = weight
        return call

    return marked


class History:
    """A world to which steps happen.

    ``random``: each step has its own, so that it is the same whatever is left out before it.
    ``met``: how often what happened.
    """

    longest: ClassVar[int] = 10

    def __init__(self, random: Random) -> None:
        self.random, self.met = random, Counter[str]()

    @classmethod
    def drawn(cls, random: Random) -> Steps:
        calls = [(name, getattr(getattr(cls, name), "weight", 0)) for name in dir(cls)]
        names = random.choices(*zip(*calls, strict=True), k=random.randint(2, cls.longest))
        return [(name, random.random()) for name in names]

    def happen(self, name: str) -> None:
        getattr(self, name)()

    def one_of(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def happens(self, share: float) -> bool:
        return self.random.random() < share

    def check(self) -> None:
        """Check what holds after each step."""

    def end(self) -> None:
        """Let everything end, and check what is left."""

    def close(self) -> None:
        """Give back what the world holds."""


def play(kind: type[History], seed: str, steps: Steps) -> Counter[str]:
    """Play one history; return how often what happened in it."""
    history = kind(Random(seed))
    try:
        for name, own in steps:
            history.random = Random(own)
            history.happen(name)
            history.check()
        history.end()
    finally:
        history.close()
    return history.met


def blocks(count: int) -> list[range]:
    return [range(start, min(start + BLOCK, count)) for start in range(0, count, BLOCK)]


def play_all(kind: type[History], numbers: range, happens: Iterable[str]) -> None:
    """Play histories by their numbers.

    ``happens``: what must happen in one of 200 at least, so that none passes for want of anything to go wrong.
    """
    met: Counter[str] = Counter()
    for number in numbers:
        seed = f"{SEED} {kind.__name__} {number}"
        steps = kind.drawn(Random(seed))
        try:
            met += play(kind, seed, steps)
        except Exception as error:
            names = ", ".join(name for name, _ in _shortest(kind, seed, steps))
            raise AssertionError(f"SEED={SEED!r}: history {number} fails; so do its steps {names}") from error
    assert not [what for what in happens if met[what] < len(numbers) // 200], met


def _shortest(kind: type[History], seed: str, steps: Steps) -> Steps:
    for place in reversed(range(len(steps))):
        fewer = [*steps[:place], *steps[place + 1 :]]
        try:
            play(kind, seed, fewer)
        except Exception:
            steps = fewer
    return steps
