"""An assessment as one page that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from foundation.files import disk_errors, write_bytes
from pipeline import assessment_text as text
from pipeline.report.report import render


def write_page(content: dict[str, Any], out: Path, dataset: str, params: Sequence[Path]) -> Path:
    """Write ``OUT/index.html``; arguments as :func:`pipeline.assessment_text.verdict_text` takes them."""
    held, _ = text.data(content["data"])
    ladder = text.ladder(content)
    page = render(
        "assessment.html.j2",
        words=_words,
        dataset=dataset,
        simulated=content["data"]["simulated"],
        answer=text.answer(content),
        recommendation=text.recommendation(content),
        ladder=ladder,
        settings=str(out / "act.yaml"),
        thresholds=text.thresholds(content["settings"]),
        commands=text.commands(content, out, dataset, params),
        figures=text.figures(content["predictable"]),
        details=text.detail_tables(content),
        held=held,
        to_do=content["data"]["to_do"],
        assumptions=[*text.policy_notes(content), *text.assumptions(content)] if ladder else [],
    )
    target = out / "index.html"
    with disk_errors(target):
        write_bytes(target, page.encode())
    return target


def _words(line: str) -> Markup:
    """Escape a line, and set what stands in backticks as code."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(line))))  # noqa: S704 - escaped
