"""What a backfill remembers, so that a killed one goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from telemetry.atomic import write_bytes
from telemetry.channel import Channel, channel_as_dict
from telemetry.collect.prometheus.spans import Span, merged
from telemetry.collect.series.mapping import SourceMapping
from telemetry.errors import InputError

_VERSION: Final = 1


def job_id(url: str, match: str, mapping: SourceMapping, channels: Mapping[str, Channel]) -> str:
    """Return a name for all that decides which rows a span of time gives.

    Returns: 16 hexadecimal digits; the same for the same server, matchers, mapping and channels.
    """
    told = {
        "url": url,
        "match": match,
        "mapping": mapping.model_dump(mode="json"),
        "channels": [channel_as_dict(channel) for channel in channels.values()],
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(slots=True)
class Pieces:
    """In which pieces the server gives one metric.

    ``window_ms``: longest time asked for at once; None: a whole span.
    ``matchers``: further matchers, one for each query of a window; together they cover every series.
    """

    window_ms: int | None = None
    matchers: list[str] = field(default_factory=lambda: [""])


@dataclass(slots=True)
class Progress:
    """How far a job is; kept in a small file, written after each span has landed.

    ``span_ms``: longest span that fits into memory; None until one did not.
    """

    path: Path
    done: list[Span] = field(default_factory=list)
    span_ms: int | None = None
    pieces: dict[str, Pieces] = field(default_factory=dict)
    xid: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Progress:
        """Return what was remembered; nothing where there is no file.

        Raises ``InputError`` if the file is damaged.
        """
        try:
            held = json.loads(path.read_bytes())
            if held["version"] != _VERSION:
                raise ValueError(f"version {held['version']}")
            return cls(
                path,
                [Span(int(after), int(until)) for after, until in held["done"]],
                held["span_ms"],
                {metric: Pieces(each["window_ms"], list(each["matchers"])) for metric, each in held["pieces"].items()},
                dict(held["xid"]),
            )
        except FileNotFoundError:
            return cls(path)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"the progress file is damaged: {error}",
                str(path),
                "Remove it: the time is then fetched again, and what has landed is not doubled.",
            ) from error

    def finish(self, span: Span) -> None:
        """Note that a span has landed, and save."""
        self.done = merged([*self.done, span])
        self.save()

    def save(self) -> None:
        """Write the file, wholly or not at all."""
        held = {
            "version": _VERSION,
            "done": [list(span) for span in self.done],
            "span_ms": self.span_ms,
            "pieces": {
                metric: {"window_ms": each.window_ms, "matchers": each.matchers}
                for metric, each in sorted(self.pieces.items())
            },
            "xid": self.xid,
        }
        write_bytes(self.path, json.dumps(held).encode())
