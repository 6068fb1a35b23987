"""Names of an inventory's nodes in other sources: one writes ``n0``, another ``n0.example.com``."""

from __future__ import annotations

from collections.abc import Iterable


class NodeNames:
    """Finds nodes under names with more or less of a domain than the inventory writes."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self._nodes = frozenset(nodes)
        self._longer: dict[str, list[str]] = {}
        for node in self._nodes:
            for beginning in _beginnings(node):
                self._longer.setdefault(beginning, []).append(node)

    def written(self, name: str) -> str:
        """Return a node's name as the inventory writes it; the name as it is where none, or more than one, fits."""
        if name in self._nodes:
            return name
        alike = {*self._longer.get(name, ()), *self._nodes.intersection(_beginnings(name))}
        return alike.pop() if len(alike) == 1 else name


def are_one_node(one: str, other: str) -> bool:
    """Whether two names may be those of one node: they are equal, or one lacks a part of the other's domain.

    Up to the first dot alone is not enough: ``10.0.0.1`` and ``10.0.0.2``, or ``rack1.n0`` and ``rack1.n1``, are two.
    """
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _beginnings(name: str) -> list[str]:
    """Return what a name is up to each of its dots: ``n0`` and ``n0.example`` of ``n0.example.com``."""
    return [name[:place] for place, letter in enumerate(name) if letter == "."]
