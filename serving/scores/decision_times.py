"""Which decision is due: the newest time of the grid whose facts are there."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from features.errors import InputError
from features.matrix.meta import MatrixConfig
from policy.risk_record import instant_words

MIN_STEPS_STALE = 2
"""Steps, in addition to the delay, that a unit's newest sample may always be old: one due and one late."""


def due_decision(config: MatrixConfig, now: datetime) -> datetime:
    """Give the newest decision time that can be scored.

    ``config``: its ``decision`` is the grid, its ``span`` that of the dataset.
    Returns: the last time of the grid that is not after the dataset's end and lies ``features.delay`` back at least.
    UTC.
    Raises ``InputError`` if the dataset begins later than that.
    """
    first, last = config.span
    t = _floor(min(now - config.features.delay, last), config)
    if t < first:
        reach = f"from {instant_words(first)} to {instant_words(last)}"
        raise InputError(
            f"no decision is due yet: the dataset reaches {reach}, it is {instant_words(now)}",
            "--dataset",
            "Wait for the first decision time within it, or name one with --at.",
        )
    return t


def asked_decision(config: MatrixConfig, at: datetime, now: datetime) -> datetime:
    """Check a decision time that was asked for.

    Returns: the same in UTC.
    Raises ``InputError`` if it is not on the grid, outside the dataset, or still to come.
    """
    at = at.astimezone(UTC)
    before = _floor(at, config)
    if before != at:
        raise InputError(
            f"{instant_words(at)} is not a decision time of this model",
            "--at",
            f"Give {instant_words(before)} or {instant_words(before + config.decision.every)}.",
        )
    first, last = config.span
    if not first <= at <= last:
        reach = f"from {instant_words(first)} to {instant_words(last)}"
        raise InputError(
            f"{instant_words(at)} lies outside the dataset, which reaches {reach}",
            "--at",
            "Give a time inside it.",
        )
    if at > now:
        raise InputError(f"{instant_words(at)} is still to come: it is {instant_words(now)}", "--at", "Wait for it.")
    return at


def expiry(config: MatrixConfig, t: datetime, issued_at: datetime) -> datetime:
    """Give the time after which a risk says nothing any more.

    Two things end it, whichever comes first: the end of the interval that it speaks of (t + gap + horizon), and two
    decision intervals after it was issued, by when two newer ones should have taken its place.
    """
    return min(t + config.labels.gap + config.labels.horizon, issued_at + 2 * config.decision.every)


def lag_seconds(config: MatrixConfig, t: datetime, now: datetime) -> float:
    """Give by how many seconds a decision is older than the one that would be due by the clock alone; 0: it is that."""
    return max((_floor(now - config.features.delay, config) - t).total_seconds(), 0.0)


def stale_after(config: MatrixConfig, asked: timedelta) -> timedelta:
    """Give the age from which on a sample is stale, for a dataset's step: at least two steps and the delay."""
    return max(asked, config.features.delay + MIN_STEPS_STALE * config.step)


def _floor(t: datetime, config: MatrixConfig) -> datetime:
    origin, every = config.decision.origin, config.decision.every
    return (origin + (t - origin) // every * every).astimezone(UTC)
