"""YAML that people write: a key that stands twice in one mapping is refused, where YAML's readers keep the last one."""

from __future__ import annotations

from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"


class _OnceLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, yaml.Mark] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if key.value in first:
                raise yaml.constructor.ConstructorError(
                    f"{key.value!r} stands twice in one mapping, first", first[key.value], "and again", key.start_mark
                )
            first[key.value] = key.start_mark
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """Read one YAML document, as ``yaml.safe_load`` does.

    Raises ``yaml.YAMLError`` if the text is not valid, or a mapping holds a key twice; names both lines.
    """
    return yaml.load(text, Loader=_OnceLoader)  # noqa: S506 - a safe loader, only stricter
