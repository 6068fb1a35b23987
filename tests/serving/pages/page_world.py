"""Scores as `predrain score` writes them, and pages read as a person's browser would."""

from datetime import timedelta
from pathlib import Path

from tests.page import Page
from tests.serving.http.world import DECIDED, Running, small_fleet
from tests.serving.score_folder import write_scores


def a_week(folder: Path) -> None:
    """Four decisions, 6 hours apart; the last is the small fleet's."""
    for back in (3, 2, 1, 0):
        decided = DECIDED - timedelta(hours=6 * back)
        write_scores(folder, small_fleet(decided), decided)


def look(service: Running, path: str, token: str | None = None) -> Page:
    """Fetch a page that must be there."""
    status, body, headers = service.client(token).send("GET", path)
    assert status == 200, (status, body)
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    return Page(body.decode())
