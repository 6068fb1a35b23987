"""Which fleets the table of results is made of, and with which parameters each is replayed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from models.config import LEARNERS
from pipeline.params import Params, load_params

ROOT = Path(__file__).resolve().parents[2]

RECOMMENDED = "recommended"
"""The profile of params.yaml, beside every learner that needs no extra."""

PAPER = "paper"
"""The paper's setting: params.yaml and params/paper.yaml on top of it."""

PAPER_TITLE = "the paper's profile"
"""How the page calls it."""

PROMISED = "promised"
"""The profile of params.yaml alone: its members, and no learner or cascade beside it. Its risks are those of
:data:`RECOMMENDED` bit for bit, so its promises are; how other models do is not seen."""

ROOMS = ("telemetry", "features", "models", "evaluation", "simulator")
"""Rooms whose code shapes the predictions that a fleet leaves."""

PROMISING = ("policy/cost_benefit.py", "policy/thresholds.py", "evaluation/backtest/promises.py")
"""Sources that make promises out of predictions: changing them spoils no fleet, only what was promised on it."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the fleets.

    ``gpus``, ``days``: GPUs and days of each.
    ``acceleration``: factor on all failure rates.
    """

    gpus: int
    days: int
    acceleration: float


@dataclass(frozen=True, slots=True)
class Part:
    """One fleet replayed with one profile.

    ``profile``: :data:`RECOMMENDED`, :data:`PAPER` or :data:`PROMISED`.
    """

    scenario: str
    seed: int
    profile: str
    size: Size

    @property
    def fleet(self) -> str:
        """Name of the fleet, as a folder."""
        return f"{self.scenario}-{self.seed}-{self.size.gpus}x{self.size.days}-x{self.size.acceleration:g}"

    @property
    def name(self) -> str:
        """Name of the part, as a folder."""
        return f"{self.fleet}-{self.profile}"


@dataclass(frozen=True, slots=True)
class Plan:
    """All parts, and how they are told.

    ``parts``: in the order in which they are run; parts of one fleet follow each other.
    ``quick``: whether this is the small table, which proves nothing.
    """

    parts: tuple[Part, ...]
    replicates: int
    quick: bool

    def of(self, scenario: str, profile: str) -> list[Part]:
        """Give the parts of a scenario and profile, by seed."""
        return [part for part in self.parts if (part.scenario, part.profile) == (scenario, profile)]

    @property
    def scenarios(self) -> tuple[str, ...]:
        """Scenarios in order."""
        return tuple(dict.fromkeys(part.scenario for part in self.parts))

    @property
    def usual(self) -> Size:
        """The size of most parts."""
        return Counter(part.size for part in self.parts).most_common(1)[0][0]

    def pools(self) -> dict[str, list[Part]]:
        """Give the recommended profile's parts that are measured together, by scenario."""
        pools = {scenario: self.of(scenario, RECOMMENDED) for scenario in self.scenarios}
        return {name: parts for name, parts in pools.items() if parts}

    def promising(self) -> dict[str, list[Part]]:
        """Give the parts whose promises are counted, by scenario: those of the pools and :data:`PROMISED`."""
        return {name: parts + self.of(name, PROMISED) for name, parts in self.pools().items()}


FULL = Size(gpus=2000, days=120, acceleration=5.0)
QUICK = Size(gpus=384, days=80, acceleration=10.0)
SEEDS: dict[str, int] = {"base": 5, "drift": 5, "announced": 5, "epidemic": 2, "noprecursor": 2}
"""Seeds of each scenario in the whole table."""

GPUS: dict[str, int] = {"announced": 4000}
"""Scenarios of other sizes in the whole table. On ``announced`` a precision of 85 % can be promised after some forty
drains that are nearly all right, which 2,000 GPUs take most of the replay to give."""

COMPARED: dict[str, int] = {"announced": 2}
"""Scenarios of which only so many seeds show all models; on the others only what is promised is seen."""

OWN_SEEDS: dict[str, int] = {"base": 5, "drift": 5}
"""Seeds of each scenario in the table of fleets at their own failure rates."""

PAPER_SCENARIOS = {False: ("base", "drift"), True: ("drift",)}
"""Scenarios whose first fleet is replayed with the paper's profile too, in the whole table and in the quick one."""

QUICK_SEEDS: dict[str, int] = {"base": 1, "drift": 2, "announced": 1}


def make_plan(
    *,
    quick: bool,
    first_seed: int = 1,
    scenarios: Sequence[str] | None = None,
    seeds: int | None = None,
    gpus: int | None = None,
    days: int | None = None,
    with_paper: bool = True,
    own_rates: bool = False,
) -> Plan:
    """Lay out the table.

    ``first_seed``: seeds are counted from here; reports use 1, development 100 and more.
    ``seeds``: at most so many seeds of each scenario.
    ``with_paper``: replay the first fleet of :data:`PAPER_SCENARIOS` with the paper's profile too.
    ``own_rates``: instead of the accelerated fleets those of :data:`OWN_SEEDS` at the failure rates as calibrated, with
    the recommended profile: acceleration makes failures frequent enough to tell models apart, and so many that a model
    needs no second fit.
    """
    usual = QUICK if quick else FULL
    size = Size(gpus or usual.gpus, days or usual.days, 1.0 if own_rates else usual.acceleration)
    table = OWN_SEEDS if own_rates else QUICK_SEEDS if quick else SEEDS
    parts: list[Part] = []
    for scenario in scenarios or table:
        large = size if quick or gpus else replace(size, gpus=GPUS.get(scenario, size.gpus))
        for seed in range(first_seed, first_seed + min(table.get(scenario, 2), seeds or 99)):
            compared = quick or own_rates or seed < first_seed + COMPARED.get(scenario, table.get(scenario, 2))
            parts.append(Part(scenario, seed, RECOMMENDED if compared else PROMISED, large))
            if with_paper and not own_rates and seed == first_seed and scenario in PAPER_SCENARIOS[quick]:
                parts.append(Part(scenario, seed, PAPER, large))
    return Plan(tuple(parts), replicates=100 if quick else 500, quick=quick)


def params_of(profile: str, files: Sequence[Path]) -> Params | None:
    """Read the parameters of a profile; None where the paper's file is not there."""
    if profile == PROMISED:
        return _alone(load_params(files))
    if profile != PAPER:
        params = load_params(files)
        learners = tuple(dict.fromkeys([*LEARNERS, *params.models.learners]))
        return params.model_copy(update={"models": params.models.model_copy(update={"learners": learners})})
    paper = ROOT / "params" / "paper.yaml"
    return load_params([*files, paper]) if paper.is_file() else None


def _alone(params: Params) -> Params:
    """Give the parameters with which nothing but the profile, an ensemble of the members, is fitted."""
    members = params.models.parallel.members
    cascade = params.models.cascade.model_copy(update={"stages": members[:1]})  # a cascade of one is its stage
    models = params.models.model_copy(update={"learners": members, "cascade": cascade})
    return params.model_copy(update={"models": models})


def code_digest(rooms: Iterable[str] = ROOMS, root: Path = ROOT) -> str:
    """Return the SHA-256 over the sources that shape what a fleet leaves."""
    paths = [path for room in rooms for path in sorted((root / room).rglob("*.py"))]
    return _digest(paths, root)


def promising_digest(root: Path = ROOT) -> str:
    """Return the SHA-256 over :data:`PROMISING`."""
    return _digest([root / name for name in PROMISING], root)


def _digest(paths: Iterable[Path], root: Path) -> str:
    total = hashlib.sha256()
    for path in paths:
        total.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def key_of(part: Part, params: Params, code: str) -> str:
    """Return what a part's result depends on, as one digest: code, parameters, fleet."""
    content = params.model_dump(mode="json", exclude={"simulate", "data"})
    content["backtest"].pop("bootstrap")
    content["models"].pop("precision_targets")  # made of the part when the page is
    inputs = json.dumps([code, content, part.name], sort_keys=True)
    return hashlib.sha256(inputs.encode()).hexdigest()
