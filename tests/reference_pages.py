"""Generate the pages of docs/reference from catalogues: ``python -m tests.reference_pages``.

The template of a page is next to its catalogue, with ``{{name}}`` as the place of a table.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from foundation.kubernetes import foreign_marks
from telemetry.collect.kubernetes.rules import Rule, default_rules
from telemetry.kernel_log.catalogue import drivers
from telemetry.phrases.classifier import catalogue

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"


def pages() -> dict[str, str]:
    """Return the content of each page by its file name."""
    return {
        "node-conditions.md": _page("telemetry/collect/kubernetes/rules.md", _conditions()),
        "phrases.md": _page("telemetry/phrases/phrases.md", _phrases()),
        "kernel-messages.md": _page("telemetry/kernel_log/messages.md", {"messages": _messages()}),
        "foreign-marks.md": _page("foundation/kubernetes/foreign_marks.md", {"marks": _marks()}),
    }


def _page(template: str, tables: dict[str, str]) -> str:
    text = (ROOT / template).read_text(encoding="utf-8")
    made = "This page is generated (`python -m tests.reference_pages`)."
    for name, table in {"made": made, **tables}.items():
        text = text.replace(f"{{{{{name}}}}}", table)
    return text


def _conditions() -> dict[str, str]:
    rules = default_rules()

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


def _messages() -> str:
    parts = []
    for driver in drivers():
        if driver.rules:
            parts.append(f"## {driver.driver[0].upper()}{driver.driver[1:]}\n")
            parts.append("| event | meaning | example |\n|---|---|---|")
        for rule in driver.rules:
            event = {"": "–", "unclear": "counted as unclear"}.get(rule.type, f"`{rule.type}` `{rule.code}`")
            cells = (event, rule.meaning, f"`{' ⏎ '.join(rule.example.splitlines())}`")
            parts.append(_table([[cell.replace("|", "\\|") for cell in cells]]))
        if driver.rules:
            parts.append("")
    return "\n".join(parts).rstrip()


def _marks() -> str:
    rows = (
        (mark.tool, *mark.pattern, mark.value.replace("|", ", "), mark.meaning) for mark in foreign_marks.catalogue()
    )
    return _table((tool, f"{kind} `{key}`", f"`{value}`", meaning) for tool, kind, key, value, meaning in rows)


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
        (FOLDER / name).write_text(text, encoding="utf-8")
