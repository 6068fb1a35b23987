"""Pages of docs/reference made from catalogues: ``python -m telemetry.collect.reference_pages docs/reference``.

The text of a page stands beside its catalogue, with ``{{tables}}`` in braces.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from telemetry.collect.kubernetes.rules import KubernetesRules, Rule, default_rules
from telemetry.phrases.classifier import catalogue

_ROOM: Final = Path(__file__).parents[1]
_MADE: Final = (
    "This page is made by `python -m telemetry.collect.reference_pages docs/reference`; a test keeps it current."
)


def pages() -> dict[str, str]:
    """Return the content of each page by its file name."""
    return {
        "node-conditions.md": _page(_ROOM / "collect" / "kubernetes" / "rules.md", _conditions(default_rules())),
        "phrases.md": _page(_ROOM / "phrases" / "phrases.md", _phrases()),
    }


def _page(template: Path, tables: dict[str, str]) -> str:
    text = template.read_text(encoding="utf-8")
    for name, table in {"made": _MADE, **tables}.items():
        text = text.replace(f"{{{{{name}}}}}", table)
    return text


def _conditions(rules: KubernetesRules) -> dict[str, str]:
    def rows(subject: str) -> list[tuple[str, str, str, str]]:
        return [
            (rule.tool or "", f"`{_subject(rule)}`", rule.status if rule.condition else "", _type(rule))
            for rule in rules.rules
            if getattr(rule, subject)
        ]

    counted = {
        "whole GPUs": rules.gpu_resources,
        "a share of one GPU": rules.slice_resources,
        "a share, by annotation": rules.slice_annotations,
        "claims of drivers": rules.claim_drivers,
    }
    resources = [(what, ", ".join(f"`{name}`" for name in names)) for what, names in counted.items()]
    subjects = {"conditions": "condition", "events": "reason", "taints": "taint"}
    return {name: _table(rows(subject)) for name, subject in subjects.items()} | {"resources": _table(resources)}


def _phrases() -> dict[str, str]:
    content = catalogue().content
    rules = [
        (rule["type"], _code(rule["match"]), _code(rule.get("near")), rule.get("only", "")) for rule in content["rules"]
    ]
    lists = ("denied", "denied_after", "false_alarm", "planned", "done")
    return {
        "senses": ", ".join(sense["name"] for sense in content["senses"]),
        "rules": _table(rules),
        "words": _table((name, _code(text)) for name, text in content["words"].items()),
        "lists": _table((name, _code(content[name])) for name in lists),
    }


def _subject(rule: Rule) -> str:
    text = rule.condition or rule.taint or (rule.reason.pattern if rule.reason else "")
    return (text + (f" with message {rule.message.pattern}" if rule.message else "")).replace("|", "\\|")


def _type(rule: Rule) -> str:
    return f"{rule.type} `{rule.code}`" if rule.code else str(rule.type)


def _code(text: str | None) -> str:
    return "" if not text else "`` " + text.replace("|", "\\|") + " ``"


def _table(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    for name, text in pages().items():
        (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")
