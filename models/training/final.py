"""Final fit for the bundle, as of the end of the data."""

from dataclasses import replace
from datetime import datetime, timedelta

from foundation.errors import InputError, TooEarlyError
from foundation.times import instant_ms
from models.config import CASCADE, BacktestSection, ModelsSection, TrainingSection
from models.rows.training_set import Matrix
from models.sequence.layout import tabular_columns, tabular_values, with_windows
from models.training.fitted import FittedModels, learners_of, model_names
from models.training.reference import make_reference
from models.training.schedule import (
    alert_budget,
    format_candidates,
    format_days,
    format_instant,
)
from models.training.spans import candidates
from models.training.trainer import Progress, Trainer


def refit_time(span: tuple[datetime, datetime], until: datetime | None) -> datetime:
    """Return the time of the fit; ``until`` None: the end of the data.

    Raises ``InputError`` if it has no time zone, and ``TooEarlyError`` if it lies outside the data.
    """
    if until is None:
        return span[1]
    if until.tzinfo is None:
        raise InputError(f"{until.isoformat()} has no time zone", "--until", "Write it as 2026-01-01T00:00:00Z.")
    if not span[0] < until <= span[1]:
        raise TooEarlyError(
            f"{until.isoformat()} is outside the data, {span[0].isoformat()} to {span[1].isoformat()}",
            "--until",
            "Give a time within the data.",
        )
    return until


def fit_final(
    matrix: Matrix,
    *,
    training: TrainingSection,
    models: ModelsSection,
    backtest: BacktestSection,
    seed: int,
    until: datetime | None = None,
    progress: Progress | None = None,
) -> FittedModels:
    """Fit the models that the profile needs at the end of the data, for the bundle.

    ``training``, ``models``, ``backtest``: as for :func:`run_backtest`; of ``backtest`` only ``k``, whose ``auto``
    counts the whole dataset.
    ``until``: fit as of this time (aware), with labels as known then; default: the end of the data.
    Returns: the prior alone if there is one and nothing to fit on yet (see :meth:`Trainer.stand_in`).
    Raises ``TooEarlyError`` if there is no prior, and no span fits the data or the chosen span holds a single class.
    """
    refit_ms = instant_ms(refit_time(matrix.span, until))
    model_names(models)  # validates the profile
    names = (models.profile,)
    matrix = with_windows(matrix, {*learners_of(models, names), *(models.cascade.stages if CASCADE in names else ())})
    trainer = Trainer(matrix, training=training, models=models, seed=seed, names=names, progress=progress)
    labels = trainer.labels_at(refit_ms)
    trainer.k = alert_budget(trainer.rows, labels, backtest, as_of_ms=refit_ms)
    span = trainer.choose_span(refit_ms, labels, None)
    if span is None and trainer.prior is not None:
        span = candidates(training)[0]
    if span is None:
        span_text = format_days(refit_ms - trainer.first_ms)
        history = (
            f"the data span {span_text}"
            if until is None
            else f"{span_text} of the data lie before {format_instant(refit_ms)} (--until)"
        )
        raise TooEarlyError(
            f"no training window fits: {history}, gap and horizon take {format_days(trainer.reach_ms)}; "
            f"{format_candidates(training)}",
            f"parameter training.{'window' if isinstance(training.window, timedelta) else 'candidate_windows'}",
            f"Give {'a shorter window' if until is None else 'a later time, a shorter window'}, or a dataset with more "
            "history.",
        )
    reason = trainer.unfit(refit_ms, labels, span)
    if reason and trainer.prior is None:
        raise TooEarlyError(
            f"the training window lacks failures, or rows without failures: {reason}",
            "parameter training.window",
            "Give a longer window, or a dataset with more history.",
        )
    fitted = trainer.stand_in(refit_ms, labels, span) if reason else trainer.fit(refit_ms, labels, span)
    reference = make_reference(
        labels,
        tabular_values(matrix, trainer.values),
        tabular_columns(matrix),
        start_ms=instant_ms(fitted.train_start),
        end_ms=instant_ms(fitted.train_end),
        as_of_ms=refit_ms,
        seed=seed,
    )
    return replace(fitted, reference=reference)
