"""Strict YAML: a duplicate key in a mapping is an error (PyYAML would use the last one)."""

from collections.abc import Mapping
from typing import Any

import yaml

_MAX_NODES = 500_000
_MAX_TEXT = 1 << 20  # the slowest megabyte takes 8 s
_MERGE = "tag:yaml.org,2002:merge"


class _OnceLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, yaml.Mark] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if key.value in first:
                raise yaml.constructor.ConstructorError(
                    f"{key.value!r} is duplicated in one mapping: first", first[key.value], "and again", key.start_mark
                )
            first[key.value] = key.start_mark
        return super().construct_mapping(node, deep)


def overlaid(base: Any, overlay: Any) -> Any:
    """Merge ``overlay`` into ``base`` recursively: mappings are merged, everything else is replaced."""
    if not (isinstance(base, Mapping) and isinstance(overlay, Mapping)):
        return overlay
    return {**base, **{key: overlaid(base.get(key), value) for key, value in overlay.items()}}


def read_yaml(text: str) -> Any:
    """Parse one YAML document, like ``yaml.safe_load``.

    Raises ``yaml.YAMLError`` if the text is invalid, has a duplicate key (both lines are named), is nested too deeply,
    is longer than 1 MiB, or expands to too many values through aliases.
    """
    if len(text) > _MAX_TEXT:
        raise yaml.YAMLError("the document is longer than 1 MiB")
    loader = _OnceLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded_size(node, {}) > _MAX_NODES:
            raise yaml.YAMLError(f"aliases expand the document to more than {_MAX_NODES} values")
        return loader.construct_document(node)
    except RecursionError as error:
        raise yaml.YAMLError("the document is nested too deeply") from error
    except (ValueError, OverflowError) as error:  # e.g. a number of 5,000 digits, March 77
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error
    finally:
        loader.dispose()


def _expanded_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return the number of values of a node with aliases expanded."""
    if id(node) not in sizes:
        sizes[id(node)] = _MAX_NODES + 1  # a node that contains itself is infinite
        content = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = [part for entry in content for part in (entry if isinstance(entry, tuple) else (entry,))]
        sizes[id(node)] = 1 + sum(_expanded_size(part, sizes) for part in parts)
    return sizes[id(node)]
