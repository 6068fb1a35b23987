"""As of when a bundle is fitted: the end of the data, or an earlier time that leaves newer decisions untouched."""

from __future__ import annotations

from datetime import datetime

from features.errors import InputError


def refit_time(span: tuple[datetime, datetime], until: datetime | None) -> datetime:
    """Give the time of the fit.

    ``span``: first and last instant of the data (aware UTC).
    ``until``: the time asked for; None: the end of the data.
    Raises ``InputError`` if the time has no zone or lies outside the data.
    """
    if until is None:
        return span[1]
    if until.tzinfo is None:
        raise InputError(f"{until.isoformat()} has no time zone", "--until", "Write it as 2026-01-01T00:00:00Z.")
    if not span[0] < until <= span[1]:
        raise InputError(
            f"{until.isoformat()} lies outside the data, {span[0].isoformat()} to {span[1].isoformat()}",
            "--until",
            "Give a time inside them.",
        )
    return until
