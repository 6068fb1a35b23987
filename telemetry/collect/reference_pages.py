"""Pages of docs/reference made from catalogues: ``python -m telemetry.collect.reference_pages docs/reference``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from telemetry.collect.kubernetes.rules import KubernetesRules, Rule, default_rules
from telemetry.phrases.classifier import catalogue

_MADE: Final = (
    "This page is made by `python -m telemetry.collect.reference_pages docs/reference`; a test keeps it current."
)


def pages() -> dict[str, str]:
    """Return the content of each page by its file name."""
    return {"node-conditions.md": conditions_page(default_rules()), "phrases.md": phrases_page()}


def conditions_page(rules: KubernetesRules) -> str:
    """Return the page of node conditions, taints and Kubernetes events."""
    subjects = (
        ("Node conditions", "condition", [rule for rule in rules.rules if rule.condition]),
        ("Kubernetes events", "reason", [rule for rule in rules.rules if rule.reason]),
        ("Taints", "taint", [rule for rule in rules.rules if rule.taint]),
    )
    lines = [
        "# Node conditions, Kubernetes events and taints",
        "",
        f"What `predrain collect kubernetes` reads, and as what. {_MADE}",
        "",
        "The first rule that matches applies. A file given with `--rules` is tried first; `telemetry/collect/"
        "kubernetes/rules.yaml` documents its keys. Patterns are globs, reasons of events are regular expressions.",
        "",
        "- `xid`: an event for each XID code in message, reason or name (`XID=79`, `Xid79`, `NVRM: Xid (PCI:…): 79`,"
        ' `{"79":true}`, `48, 79`), of the GPU that is named by UUID or PCI address, else of the node. Without a code'
        " the event is `other`.",
        "- `other`: an event of the node that is no failure by itself. `ignore`: no event; it is counted by name.",
        "- A condition that no rule names becomes `other` if its name is about hardware (GPU, XID, NVLink, ECC, RDMA,"
        " …). It is bad when `False` if the name ends in `Ready`, `Healthy` and the like, else when `True`. All others"
        " are counted by name.",
        "- `Unknown` neither begins nor ends an event. A condition that is healthy again ends it.",
        "- `Ready` has events of its own: `node_not_ready`, `node_ready`.",
    ]
    for title, subject, chosen in subjects:
        rows = [(rule.tool or "", f"`{_subject(rule)}`", _bad(rule), _type(rule)) for rule in chosen]
        lines += ["", f"## {title}", "", *_table(("tool", subject, "bad when", "event"), rows)]
    lines += ["", "## GPUs that pods ask for", ""]
    named = (
        ("whole GPUs", rules.gpu_resources),
        ("a share of one GPU", rules.slice_resources),
        ("a share, by annotation", rules.slice_annotations),
        ("claims of drivers", rules.claim_drivers),
    )
    listed = [(what, ", ".join(f"`{name}`" for name in names)) for what, names in named]
    lines += _table(("counts as", "resources"), listed)
    return "\n".join(lines) + "\n"


def phrases_page() -> str:
    """Return the page of phrases in drain reasons and tickets."""
    content = catalogue().content
    lines = [
        "# Words of drain reasons and tickets",
        "",
        f"How `collect slurm`, `collect tickets` and `import --events` read text. {_MADE}",
        "",
        "A text is split into clauses. In each clause the first rule that matches gives the type of the event, unless"
        " the clause denies it (`not replaced`, `RMA declined`) or only announces the work (`will be replaced`,"
        " `pending RMA`). A text that no rule is sure of is `other`. Commands list each distinct phrase with its"
        " count and type under `phrases`, for review.",
        "",
        "Rules of your own go first: `--reasons rules.yaml` of `collect slurm`, `values: {type: …}` in the mapping of a"
        " table.",
        "",
        "```yaml",
        "reasons:                      # searched anywhere in the text, without case",
        '  - {match: "ticket closed", type: repair, code: ticket}',
        "defaults: true                # false: only these rules",
        "```",
        "",
        "Words with another meaning are left out first: "
        + ", ".join(sense["name"] for sense in content["senses"])
        + ".",
        "",
        "## Rules",
        "",
        "`{name}` stands for the words of that name below; `near` must be in the same clause.",
        "",
    ]
    lines += _table(
        ("type", "match", "near", "only in"),
        [
            (rule["type"], _code(rule["match"]), _code(rule.get("near")), rule.get("only", ""))
            for rule in content["rules"]
        ],
    )
    lines += [
        "",
        "## Words",
        "",
        *_table(("name", "words"), [(name, _code(text)) for name, text in content["words"].items()]),
    ]
    names = ("denied", "denied_after", "false_alarm", "planned", "done")
    lines += [
        "",
        "## Negations and plans",
        "",
        *_table(("list", "words"), [(name, _code(content[name])) for name in names]),
    ]
    return "\n".join(lines) + "\n"


def _subject(rule: Rule) -> str:
    text = rule.condition or rule.taint or (rule.reason.pattern if rule.reason else "")
    text += f" with message {rule.message.pattern}" if rule.message else ""
    return text.replace("|", "\\|")


def _bad(rule: Rule) -> str:
    return rule.status if rule.condition else ""


def _type(rule: Rule) -> str:
    return f"{rule.type} `{rule.code}`" if rule.code else str(rule.type)


def _code(text: str | None) -> str:
    return "" if not text else "`` " + text.replace("|", "\\|") + " ``"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


if __name__ == "__main__":
    for name, text in pages().items():
        (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")
