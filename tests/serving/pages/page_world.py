"""Scores as `predrain score` writes them, and pages read as a person's browser would."""

from datetime import datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from policy.risk_record import RiskRecord
from serving.scores.writing import ScoresFolder, write_decision
from tests.serving.http.world import DECIDED, Running, small_fleet


def store(folder: Path, records: list[RiskRecord], decided: datetime = DECIDED, **model: Any) -> None:
    """Write a decision with Parquet, JSON Lines and summary, and point to the newest."""
    scores = ScoresFolder(folder)
    summary = {
        "format": 2,
        "units": len(records),
        "thresholds": {"watch": 0.02, "elevated": 0.1, "high": 0.5},
        "model": {"fitted_at": (DECIDED - timedelta(days=2)).isoformat(), **model},
    }
    with scores.building(decided) as swap:
        write_decision(swap.path, records, summary)
        swap.commit()
    scores.point_to_newest()


def a_week(folder: Path) -> None:
    """Four decisions, 6 hours apart; the last is the small fleet's."""
    for back in (3, 2, 1, 0):
        decided = DECIDED - timedelta(hours=6 * back)
        store(folder, small_fleet(decided), decided)


class Page(HTMLParser):
    """What stands on a page: its text, links with their words, table rows, headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self._words: list[str] = []
        self._link: tuple[str, int] | None = None
        self.feed(text)
        self.text = " ".join(" ".join(self._words).split())

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._open.append(tag)
        if tag == "a" and "href" in attributes:
            self._link = (attributes["href"], len(self._words))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._open:
            self._open.pop()
        if tag == "a" and self._link is not None:
            href, start = self._link
            self.links.append((href, " ".join(" ".join(self._words[start:]).split())))
            self._link = None

    def handle_data(self, data: str) -> None:
        self._words.append(data)
        if self._open:
            self.rows[-1][-1] = f"{self.rows[-1][-1]} {data}".strip()

    def column(self, at: int = 0) -> list[str]:
        """Return a column of the first table, without its head."""
        return [row[at] for row in self.rows[1:] if len(row) > at]


def look(service: Running, path: str, token: str | None = None) -> Page:
    """Fetch a page that must be there."""
    status, body, headers = service.client(token).send("GET", path)
    assert status == 200, (status, body)
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    return Page(body.decode())
