"""Writes that Slurm did not answer, and that may come through after a person has written to the node."""

from __future__ import annotations

from scheduler.slurm.node import NodeChange, SlurmNode

_MOST: int = 10_000


class LateWrites:
    """Remembers unanswered drains, and what a person wrote to their nodes in the meantime; within one process."""

    def __init__(self) -> None:
        self._sent: dict[str, str] = {}
        self._theirs: dict[str, SlurmNode] = {}

    def unanswered(self, node: str, change: NodeChange) -> None:
        """Note a write that was not answered, and does not stand."""
        if change.reason is not None and len(self._sent) < _MOST:
            self._sent[node] = change.reason

    def settled(self, node: str) -> None:
        """Forget a node: we have written to it anew."""
        self._sent.pop(node, None)
        self._theirs.pop(node, None)

    def seen(self, node: SlurmNode, foreign: bool) -> None:
        """Note how a node was read; ``foreign``: with a reason that is not ours."""
        if node.name not in self._sent:
            return
        if foreign:
            self._theirs[node.name] = node
        elif node.reason != self._sent[node.name]:  # nobody's any more: a person gave it back
            self._theirs.pop(node.name, None)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes on which a person's reason stood while a write of ours was open."""
        return tuple(self._theirs)

    def put_back(self, node: SlurmNode) -> NodeChange:
        """Give what puts a person's reason back over our own that came late; empty where ours did not come."""
        theirs = self._theirs.get(node.name)
        if theirs is None or not theirs.out or node.reason != self._sent.get(node.name):
            return NodeChange()
        return NodeChange("FAIL" if theirs.out == {"FAIL"} else "DRAIN", theirs.reason, theirs.extra)
