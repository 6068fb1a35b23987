"""What a reader and a browser find in HTML. Tags have to be balanced, ids unique and table heads scoped."""

from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "input", "br", "hr", "img", "use", "path", "rect", "circle", "line"}
HEADINGS = ("h1", "h2", "h3")
INLINE = {"a", "abbr", "b", "code", "em", "i", "small", "span", "strong", "text", "tspan", "time"}


class Page(HTMLParser):
    """Text, headings, links with their text, tables and tags with their attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.links: list[tuple[str, str]] = []
        self.headings: list[tuple[int, str]] = []
        self.tables: list[tuple[str, list[list[str]]]] = []
        self._open: list[tuple[str, int]] = []
        self._texts: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []
        self.text, self.rows = self._since(0), [row for _, rows in self.tables for row in rows]
        self.ids = [attributes["id"] for _, attributes in self.tags if "id" in attributes]
        assert len(self.ids) == len(set(self.ids))

    def _since(self, start: int) -> str:
        return " ".join("".join(self._texts[start:]).split())

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        self._texts.append("" if tag in INLINE else " ")
        if tag not in VOID:
            self._open.append((tag, len(self._texts)))
        if tag == "table":
            self.tables.append(("", []))
        elif tag == "tr":
            self.tables[-1][1].append([])
        assert tag != "th" or dict(attrs)["scope"] in ("row", "col")

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        opened, start = self._open.pop()
        assert opened == tag
        text = self._since(start)
        self._texts.append("" if tag in INLINE else " ")
        if tag in ("th", "td"):
            self.tables[-1][1][-1].append(text)
        elif tag == "caption":
            self.tables[-1] = (text, self.tables[-1][1])
        elif tag in HEADINGS:
            self.headings.append((int(tag[1]), text))
        elif tag == "a":
            href = next(attributes["href"] for tag, attributes in reversed(self.tags) if tag == "a")
            self.links.append((href, text))

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & {tag for tag, _ in self._open}:
            self._texts.append(data)

    def column(self, at: int = 0) -> list[str]:
        """Return a column of the first table, without its head."""
        return [row[at] for row in self.rows[1:] if len(row) > at]

    def table(self, caption: str) -> list[list[str]]:
        """Return the rows of the table of this caption."""
        (rows,) = (rows for title, rows in self.tables if caption in title)
        return rows
