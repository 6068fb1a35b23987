"""A sliding backtest of LightGBM in kept bins, beside one that bins the raw matrix at every refit.

A simulated fleet with drift (a million rows of 300 features on disk), 12 refits a week apart on the last 28 days, the
training section's defaults. Each refit reads its rows, fits and scores the week that follows; labels and the choice of
rows, the same for all, are not timed. Three ways:

- *kept bins*: ``training.bins.refits: 12``, edges found before the first refit, rows put into bins once;
- *own bins*: ``training.bins.refits: 0``, the default;
- *as it was* before kept bins, columns-first histograms and the window of newest rows: read anew, own bins, rows first.

Before anything is timed, scores in kept bins must equal, bit for bit, those of rows put into the same edges at each
refit. What ageing edges cost in average precision is printed for several ages; ``--quick`` also shows XGBoost, which
can take over edges but not rows in bins. Each way runs in a process of its own, whose peak memory is told.

    python benchmarks/sliding_refit.py [--quick] [--work FOLDER] [--seed SEED]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a file, this folder's parent is not on the path
    sys.path.insert(0, str(ROOT))

import lightgbm  # noqa: E402
import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
import xgboost  # noqa: E402
from sklearn.metrics import average_precision_score  # noqa: E402

from benchmarks.own_process import peak_mb, told_by  # noqa: E402
from features.matrix.matrix import FeatureMatrix  # noqa: E402
from features.times import duration_ms, instant_ms  # noqa: E402
from models.config import BacktestSection, BinsSection, TrainingSection  # noqa: E402
from models.fit_facts import FitFacts  # noqa: E402
from models.fits import FitRows, LocalFits  # noqa: E402
from models.kept_bins import BinKeeper, KeptBins  # noqa: E402
from models.learners import THREADS, make_learner  # noqa: E402
from models.odds import log_odds  # noqa: E402
from models.on_bins import on_bins  # noqa: E402
from models.ranking import seed_of  # noqa: E402
from models.row_reader import StretchReader, row_reader  # noqa: E402
from models.schedule import Schedule, instant_of, plan_schedule  # noqa: E402
from models.trainer import reach_of  # noqa: E402
from models.training_set import Labels, Rows, choose_rows  # noqa: E402
from pipeline.matrix_stage import make_matrix  # noqa: E402
from pipeline.params import load_params  # noqa: E402
from simulator.simulate import simulate  # noqa: E402

REQUIRED = 3.0
"""How many times as fast as binning the raw matrix at every refit it is to be."""

AIM = f"{REQUIRED:g} times"

REFITS = 12
DAYS = 126
SPAN = timedelta(days=28)
COLUMNS = 300
WAYS = ("as it was", "own bins", "kept bins")


class Narrow:
    """A matrix of which some columns are seen."""

    def __init__(self, matrix: FeatureMatrix, columns: int) -> None:
        picked = np.unique(np.linspace(0, len(matrix.columns) - 1, columns).astype(int))
        self._matrix = matrix
        self.columns = [matrix.columns[each] for each in picked]
        self._names = [column.name for column in self.columns]
        self.rows: pd.DataFrame = matrix.rows
        self.span, self.digest = matrix.span, matrix.digest

    def values(self, row_indices: Any = None) -> np.ndarray:
        """Give features of rows."""
        return self._matrix.values(row_indices, columns=self._names)

    def incidents(self, as_of: Any = None) -> pd.DataFrame:
        """Give incidents."""
        return self._matrix.incidents(as_of)

    def labels(self, as_of: Any = None, *, horizon: timedelta | None = None) -> pd.DataFrame:
        """Give labels."""
        return self._matrix.labels(as_of, horizon=horizon)


@dataclass(frozen=True, slots=True)
class Refit:
    """Rows that one refit is fitted on, and rows that it scores."""

    at_ms: int
    rows: np.ndarray
    label: np.ndarray
    weight: np.ndarray
    tested: np.ndarray


class Anew:
    """Reads rows of a matrix from disk whenever they are asked for."""

    def __init__(self, matrix: Narrow) -> None:
        self._matrix = matrix

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Give the features of rows by their positions."""
        return self._matrix.values(rows)

    def stretch(self, first: int, until: int, whole: int) -> np.ndarray:  # noqa: ARG002 - nothing is held
        """Give the features of neighbouring rows."""
        return self._matrix.values(np.arange(first, until))


class TimedReader:
    """Reads as another reader does, and counts the seconds of the processor that it takes."""

    def __init__(self, read: StretchReader) -> None:
        self._read = read
        self.spent = 0.0

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Give the features of rows by their positions."""
        clock = time.process_time()
        found = self._read(rows)
        self.spent += time.process_time() - clock
        return found

    def stretch(self, first: int, until: int, whole: int) -> np.ndarray:
        """Give the features of neighbouring rows."""
        clock = time.process_time()
        found = self._read.stretch(first, until, whole)
        self.spent += time.process_time() - clock
        return found


class Backtest:
    """The refits of a matrix, and the ways to fit them."""

    def __init__(self, matrix: Narrow, training: TrainingSection, seed: int) -> None:
        self.matrix, self.training, self.seed = matrix, training, seed
        self.rows = Rows.of(matrix.rows)
        self.final = Labels.of(matrix.labels())
        self.reach_ms = reach_of(self.rows, self.final)
        section = BacktestSection(first_test=instant_of(instant_ms(matrix.span[0]) + duration_ms(timedelta(days=42))))
        schedule = plan_schedule(matrix, self.rows, training=training, backtest=section, reach_ms=self.reach_ms)
        self.refits = [self._refit(schedule, number) for number in range(REFITS)]

    def _refit(self, schedule: Schedule, number: int) -> Refit:
        at_ms = schedule.refits_ms[number]
        chosen = choose_rows(
            self.rows,
            Labels.of(self.matrix.labels(instant_of(at_ms))),
            start_ms=at_ms - self.reach_ms - duration_ms(SPAN),
            complete_by_ms=at_ms,
            as_of_ms=at_ms,
            negative_ratio=self.training.negative_ratio,
            seed=self.seed,
        )
        return Refit(at_ms, chosen.rows, chosen.label, chosen.weight, schedule.fold_rows(self.rows, number))

    def bins(self, read: Any, refits: int) -> BinKeeper:
        """Give the keeper of bins that serve so many refits."""
        return BinKeeper(
            self.matrix,
            self.rows,
            read,
            training=self.training.model_copy(update={"bins": BinsSection(refits=refits)}),
            refits_ms=tuple(each.at_ms for each in self.refits),
            first_ms=instant_ms(self.matrix.span[0]),
            reach_ms=self.reach_ms,
            seed=self.seed,
            threads=THREADS,
        )

    def labels_at(self, at_ms: int) -> Labels:
        """Give labels as of a refit."""
        return Labels.of(self.matrix.labels(instant_of(at_ms)))

    def run(
        self, name: str, *, kept: int, anew: bool = False, binned: bool = True, only: Sequence[int] | None = None
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Fit and score refits.

        ``kept``: refits that edges serve; 0: own bins.
        ``anew``: read every set of rows from disk and build histograms rows first, as before.
        ``binned``: whether rows may be held in bins; else each refit puts its rows into the edges.
        Returns: Log-odds of each refit's tested rows, and seconds of the processor and of the clock by what was done.
        """
        read = TimedReader(Anew(self.matrix) if anew else row_reader(self.matrix, self.training.bytes_held))
        keeper = self.bins(read, kept)
        seconds = dict.fromkeys(("read", "fit", "score", "wall"), 0.0)
        scores = []
        for number, refit in enumerate(self.refits):
            if only is not None and number not in only:
                continue
            known = {refit.at_ms: self.labels_at(refit.at_ms)} if kept else {}
            begin, read.spent = time.perf_counter(), 0.0
            clock = time.process_time()
            bins: KeptBins | None = keeper.at(refit.at_ms, known.__getitem__)
            if bins is not None:
                bins.held = bins.held and binned
            learner = make_learner(name, seed=seed_of(self.seed, name, refit.at_ms))
            if anew and name == "lightgbm":
                learner.set_params(force_col_wise=False, force_row_wise=True)
            chosen = FitRows(refit.label, refit.weight, self.rows.tie[refit.rows], FitFacts.of(rows=refit.rows))
            with LocalFits(read).on(chosen) as fits:
                fitted = fits.learners({name: on_bins(learner, bins)})[name]
            seconds["fit"] += time.process_time() - clock - read.spent
            tested = read(refit.tested)
            seconds["read"] += read.spent
            clock = time.process_time()
            scores.append(log_odds(fitted, tested))
            seconds["score"] += time.process_time() - clock
            seconds["wall"] += time.perf_counter() - begin
        seconds["cpu"] = seconds["read"] + seconds["fit"] + seconds["score"]
        return scores, seconds

    def average_precision(self, scores: Sequence[np.ndarray]) -> float:
        """Give the mean over folds of average precision on the tested rows whose label is known."""
        found = []
        for refit, score in zip(self.refits, scores, strict=True):
            label = self.final.label[refit.tested]
            if (label == 1).any():
                found.append(average_precision_score(label[label >= 0], score[label >= 0]))
        return float(np.mean(found))


def opened(folder: Path) -> Backtest:
    """Open the matrix at a folder, with the parameters' defaults and the benchmark's span."""
    params = load_params([ROOT / "params.yaml"])
    training = params.training.model_copy(update={"span": SPAN})
    return Backtest(Narrow(FeatureMatrix.open(folder), COLUMNS), training, params.seed)


def timed_rounds() -> list[float]:
    """Give a list to which each round of boosting adds its seconds of the processor; a fit's other seconds are bins."""
    spent: list[float] = []
    for booster in (lightgbm.Booster, xgboost.Booster):

        def counted(*args: Any, update: Any = booster.update, **options: Any) -> Any:
            clock = time.process_time()
            told = update(*args, **options)
            spent.append(time.process_time() - clock)
            return told

        booster.update = counted
    return spent


def way(folder: Path, name: str, learner: str) -> None:
    """Run one way in this process and print what it took."""
    backtest = opened(folder)
    rounds = timed_rounds()
    backtest.run(learner, kept=REFITS, only=[0])  # compilers and libraries are loaded, pages of files are in memory
    rounds.clear()
    scores, seconds = backtest.run(learner, kept=REFITS if name == "kept bins" else 0, anew=name == "as it was")
    seconds["boosting"] = sum(rounds)
    print(json.dumps({**seconds, "peak_mb": peak_mb(), "ap": backtest.average_precision(scores)}))


def make(folder: Path, *, gpus: int, seed: int) -> Path:
    """Simulate the fleet and compute its features, unless the folder has them."""
    out = folder / f"matrix-{gpus}-{seed}"
    if not (out / "matrix.json").exists():
        dataset = folder / f"fleet-{gpus}-{seed}"
        simulate(dataset, gpus=gpus, days=DAYS, seed=seed, scenario="drift", acceleration=10.0)
        make_matrix(dataset, load_params([ROOT / "params.yaml"]), out)
    return out


def check(backtest: Backtest) -> None:
    """End the run where scores of any refit differ from those of rows put into the same edges at each refit."""
    fast, _ = backtest.run("lightgbm", kept=REFITS)
    slow, _ = backtest.run("lightgbm", kept=REFITS, binned=False)
    if not all(np.array_equal(one, other) for one, other in zip(fast, slow, strict=True)):
        sys.exit("scores in kept bins differ from those of the same edges: nothing is measured")


def ages(backtest: Backtest, own: float, kept: Sequence[int]) -> None:
    """Print what edges of several ages cost in average precision."""
    print(f"\naverage precision, mean of {REFITS} folds: own bins {own:.4f}")
    for refits in kept:
        found = backtest.average_precision(backtest.run("lightgbm", kept=refits)[0])
        print(f"  edges renewed after {refits:>2} refits   {found:.4f}  ({found - own:+.4f})")


def main() -> None:
    """Check, measure, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    parser.add_argument("--work", type=Path, help="folder to keep fleet and matrix in")
    parser.add_argument("--seed", type=int, default=101, help="of the fleet")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--learner", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        way(args.work, args.way, args.learner)
        return
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        folder = make(work, gpus=125 if args.quick else 1250, seed=args.seed)
        backtest = opened(folder)
        fitted = [len(refit.rows) for refit in backtest.refits]
        positives = [int(refit.label.sum()) for refit in backtest.refits]
        print(
            f"{len(backtest.rows.time):,} rows of {COLUMNS} features; {REFITS} refits on {min(fitted):,} to "
            f"{max(fitted):,} rows with {min(positives)} to {max(positives)} positives"
        )
        check(backtest)
        print("scores in kept bins equal those of the same edges bit for bit\n")
        heads = ("CPU s", "read", "fit", "boosting", "score", "wall s", "MB")
        print(f"{'learner':<10}{'way':<12}{''.join(f'{head:>9}' for head in heads)}{'AP':>9}")
        found: dict[tuple[str, str], dict[str, float]] = {}
        for learner, ways in (("lightgbm", WAYS), ("xgboost", WAYS[1:] if args.quick else ())):
            for name in ways:
                each = found[learner, name] = told_by(__file__, "--way", name, "--learner", learner, "--work", folder)
                print(
                    f"{learner:<10}{name:<12}{each['cpu']:>9.1f}{each['read']:>9.1f}{each['fit']:>9.1f}"
                    f"{each['boosting']:>9.1f}{each['score']:>9.1f}{each['wall']:>9.1f}{each['peak_mb']:>9.0f}{each['ap']:>9.4f}"
                )
        ages(backtest, found["lightgbm", "own bins"]["ap"], (1, 3, 6) if args.quick else (3,))
    kept = found["lightgbm", "kept bins"]
    ratios = {name: found["lightgbm", name]["cpu"] / kept["cpu"] for name in WAYS[:2]}
    met = ratios["own bins"] >= REQUIRED
    bound = found["lightgbm", "own bins"]["cpu"] / kept["boosting"]
    print(f"\nwere all but boosting free, kept bins would be {bound:.1f} times as fast as own bins")
    line = {
        "name": "sliding_refit",
        "value": round(kept["cpu"], 1),
        "unit": f"CPU s for {REFITS} refits",
        "peer": "own bins at every refit",
        "ratio": round(ratios["own bins"], 2),
        "limit_share": None,
        "checked": True,
        "aim": AIM,
        "met": met,
        "others": {
            "as it was": round(ratios["as it was"], 2),
            "peak MB": round(kept["peak_mb"]),
            "average precision lost": round(found["lightgbm", "own bins"]["ap"] - kept["ap"], 4),
        },
    }
    print(json.dumps(line))
    if not met and not args.quick:
        sys.exit(f"kept bins are {ratios['own bins']:.2f} times as fast as own bins; they are to be {REQUIRED} times")


if __name__ == "__main__":
    main()
