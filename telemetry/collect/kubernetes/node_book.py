"""Every node that we know, what was told of it, and where it stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from telemetry.collect.event import Event
from telemetry.collect.kubernetes.node_changes import node_changes, node_gone
from telemetry.collect.kubernetes.node_view import NodeView
from telemetry.collect.kubernetes.rules import KubernetesRules
from telemetry.milliseconds import to_ms

SIGHTING_EVERY: Final = timedelta(hours=1)
"""Where a node stands is landed when it changes, and else so often."""

GONE_KEPT: Final = timedelta(days=90)
"""A removed node is remembered so long: a repair takes weeks, and what comes back is compared with what went."""


class NodeBook:
    """The nodes of a fleet.

    ``cluster``: name of the cluster, for the inventory; labels that tell one go before it.
    ``all_nodes``: whether nodes without GPUs are taken too. A node that once had GPUs is taken for ever.
    ``content``: what :meth:`content` returned.
    """

    def __init__(
        self,
        rules: KubernetesRules,
        *,
        cluster: str | None = None,
        all_nodes: bool = False,
        content: Mapping[str, Any] | None = None,
    ) -> None:
        self._rules = rules
        self._cluster = cluster
        self._all = all_nodes
        content = content or {}
        self._nodes = {each["name"]: NodeView.of_content(each) for each in content.get("nodes", ())}
        self._gone = {each["name"]: (NodeView.of_content(each), ms) for each, ms in content.get("gone", ())}
        self._sighted: dict[str, tuple[dict[str, str], datetime]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, name: str) -> bool:
        return name in self._nodes or name in self._gone

    def content(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return {
            "nodes": [view.content() for view in self._nodes.values()],
            "gone": [[view.content(), ms] for view, ms in self._gone.values()],
        }

    def see(self, view: NodeView, at: datetime) -> list[Event]:
        """Take in how a node is now; return what happened to it."""
        before = self._nodes.get(view.name)
        if before is None and view.name in self._gone:
            before, _ = self._gone.pop(view.name)
        if before is None and not (self._all or view.has_gpus):
            return []
        if before is not None:
            # A node that has just registered again may not say yet which machine it is: until then, it is the old one.
            view = replace(
                view,
                system_uuid=view.system_uuid or before.system_uuid,
                boot_id=view.boot_id or before.boot_id,
                provider_id=view.provider_id or before.provider_id,
            )
        self._nodes[view.name] = view
        return [] if view == before else node_changes(before, view, self._rules, at)

    def lose(self, name: str, at: datetime) -> list[Event]:
        """Take in that a node was removed; return what that means."""
        view = self._nodes.pop(name, None)
        if view is None:
            return []
        oldest = to_ms(at - GONE_KEPT)
        self._gone = {each: (old, ms) for each, (old, ms) in self._gone.items() if ms > oldest}
        self._gone[name] = (view, to_ms(at))
        self._sighted.pop(name, None)
        return [node_gone(view, at)]

    def keep_only(self, names: Iterable[str], at: datetime) -> list[Event]:
        """Take in a listing: whoever is not in it was removed."""
        there = set(names)
        return [event for name in [each for each in self._nodes if each not in there] for event in self.lose(name, at)]

    def sightings(self, now: datetime) -> list[dict[str, Any]]:
        """Return rows of the inventory that are due: ``gpu`` null, the node's place, when it was seen so.

        Nodes of which no place is known have none: what is in them the exporter says.
        """
        rows = []
        for name, view in self._nodes.items():
            place = dict(view.place)
            if self._cluster is not None:
                place.setdefault("cluster", self._cluster)
            if not place:
                continue
            told = self._sighted.get(name)
            if told is not None and told[0] == place and timedelta() <= now - told[1] < SIGHTING_EVERY:
                continue
            self._sighted[name] = (place, now)
            rows.append({"node": name, **place, "seen_at": to_ms(now)})
        return rows
