"""Node names: letter case, short and fully qualified forms, and aliases.

A name is resolved against a set of known nodes. An exact match wins, then a match that differs only in letter case,
then a match with more or less of the same domain. A name with several matches is ambiguous and matches no node.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

_DEFAULT_DOMAIN: Final = re.compile(r"\.(?:localdomain|local|\(none\))\Z")
# Hosts without a configured domain append one of these to their names.
_URL: Final = re.compile(r"(?:[a-z]+://)?(?P<host>\[[0-9a-f:.]+\]|[^/:\s]+)(?::\d{2,5})?(?:/metrics)?/?")
# A table may identify a node by the scrape address of its exporter.
_PROVIDER: Final = re.compile(r"(?:(?!https?:)[a-z]+://\S*/|nodes?/)(?P<host>[^/\s]+)")
# Kubernetes gives the identity in the cloud as ``aws:///us-east-1a/i-0abc``, and kubectl writes ``node/n0``.
_CLOUD_NAME: Final = re.compile(r"ip((?:-\d{1,3}){4})(?:\.|\Z)")


class NodeNames:
    """Resolves node names.

    ``nodes``: known nodes, in the spelling of results.
    ``aliases``: maps further names, in any letter case, to nodes; takes precedence over any other match.

    ``long_forms``: keys of resolved names with a longer domain, by node.
    """

    def __init__(self, nodes: Iterable[str], aliases: Mapping[str, str] | None = None) -> None:
        self.long_forms: dict[str, set[str]] = {}
        self.nodes = frozenset(nodes)
        self._aliases = {node_key(alias): node for alias, node in (aliases or {}).items()}
        self._by_key: dict[str, list[str]] = {}
        self._by_short: dict[str, list[str]] = {}
        for node in sorted(self.nodes):
            self._by_key.setdefault(node_key(node), []).append(node)
            for short in _shorter(node_key(node)):
                self._by_short.setdefault(short, []).append(node)
        self._resolved: dict[str, str | None] = {}

    def candidates(self, name: str) -> Sequence[str]:
        """Return the nodes that match a name: none if it is unknown, several if it is ambiguous."""
        name = self._without_alias(name)
        if name in self.nodes:
            return (name,)
        key = node_key(name)
        same = self._by_key.get(key)
        if same:
            return same
        shorter = [node for short in _shorter(key) for node in self._by_key.get(short, ())]
        return list(dict.fromkeys([*self._by_short.get(key, ()), *shorter]))

    def longer(self, key: str) -> Sequence[str]:
        """Return the nodes whose names extend a key by more of the domain."""
        return self._by_short.get(key, ())

    def find(self, name: str) -> str | None:
        """Return the node with this name; None if it is unknown or ambiguous."""
        if name not in self._resolved:
            candidates = self.candidates(name)
            node = self._resolved[name] = candidates[0] if len(candidates) == 1 else None
            key = node_key(self._without_alias(name))
            if node is not None and node_key(node) in _shorter(key):
                self.long_forms.setdefault(node, set()).add(key)
        return self._resolved[name]

    def in_several_domains(self) -> dict[str, list[str]]:
        """Return the nodes with a short name that may be of several nodes, and the longer names, sorted."""
        domains: dict[str, list[str]] = {}
        for node in sorted(self.nodes):
            others = [node_key(other) for other in self.longer(node_key(node))]
            forms = sorted({*others, *self.long_forms.get(node, ())})
            if others or any(not are_one_node(forms[0], form) for form in forms):
                domains[node] = forms
        return domains

    def is_ambiguous(self, name: str) -> bool:
        """Whether several nodes match a name."""
        return len(self.candidates(name)) > 1

    def written(self, name: str) -> str:
        """Return the known spelling of a name, or the name with aliases resolved if it is unknown or ambiguous."""
        return self.find(name) or self._without_alias(name)

    def _without_alias(self, name: str) -> str:
        key = node_key(name)
        for form in (key, *(() if key in self._by_key else _shorter(key))):
            if form in self._aliases:
                return self._aliases[form]
        return name

    def written_all(self, names: Iterable[str | None]) -> list[str | None]:
        """Return the known spelling of each name; None stays None."""
        return [None if name is None else self.written(name) for name in names]


def one_spelling(names: Iterable[str], known: Iterable[str] = (), case_sensitive: Iterable[str] = ()) -> dict[str, str]:
    """Map each of ``names`` to one spelling per node.

    It is the spelling of a known node, or else the first of names that differ in letter case, or the shorter of two
    that differ in domain. ``case_sensitive``: keys (:func:`node_key`) whose spellings in different letter case are
    different nodes.
    """
    names, case_sensitive, of_known = list(dict.fromkeys(names)), set(case_sensitive), NodeNames(known)
    spelled, first = {name: of_known.written(name) for name in names}, dict[str, str]()
    for name in names:
        key = node_key(name)
        if not of_known.candidates(name) and key not in case_sensitive:
            spelled[name] = first.setdefault(key, name)
    unknown = NodeNames(first.values())
    for name in names:
        forms = [form for form in _shorter(node_key(name)) if form in first]
        if node_key(name) in first and len(forms) == 1 and len(unknown.longer(forms[0])) == 1:
            spelled[name] = first[forms[0]]
    return spelled


def are_one_node(name: str, other: str) -> bool:
    """Whether two names may refer to one node: equal up to letter case, or one extends the other by its domain.

    The part up to the first dot is not enough: ``10.0.0.1`` and ``10.0.0.2``, and ``rack1.n0`` and ``rack1.n1``, are
    different nodes.
    """
    name, other = node_key(name), node_key(other)
    return name == other or name in _shorter(other) or other in _shorter(name)


def is_address(name: str) -> bool:
    """Whether a name is an IP address, which has no short form."""
    if "." not in name and ":" not in name:
        return False  # most names of nodes, and parsing is slow
    try:
        ipaddress.ip_address(name.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


@lru_cache(maxsize=20_000)
def node_key(name: str) -> str:
    """Return the comparison key of a name."""
    key = name.strip().casefold()
    address = _PROVIDER.fullmatch(key) or _URL.fullmatch(key)
    return _DEFAULT_DOMAIN.sub("", (key if address is None else address["host"]).rstrip("."))


def _shorter(key: str) -> list[str]:
    """Return the shorter forms of a key: ``n0`` and ``n0.example`` of ``n0.example.com``, the address of a cloud."""
    if is_address(key):
        return []
    forms = [key[:place] for place, letter in enumerate(key) if letter == "." and place]
    cloud = _CLOUD_NAME.match(key)
    addresses = [] if cloud is None else [cloud[1][1:].replace("-", ".")]
    return [form for form in forms if not is_address(form)] + addresses
