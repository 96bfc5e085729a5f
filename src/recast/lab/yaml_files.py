"""Bounded reading of YAML, which may come from anywhere. Imports no torch."""

from __future__ import annotations

from typing import Any

import yaml

from recast.errors import shown

SETTINGS = 2**19
"""Bytes of what people write by hand: recipes. PyYAML reads some 100 kB a second."""
DEEPEST = 32
"""Levels of lists and mappings in one another."""


def parse_yaml(text: str) -> Any:
    """Parse YAML as plain data.

    Raises ValueError in one line for other text, and for what a recipe does not need: aliases (a few lines of them
    stand for gigabytes), duplicate keys and deep nesting.
    """
    try:
        return yaml.load(text, _PlainLoader)
    except (yaml.YAMLError, ValueError) as error:  # the latter for a number of 5,000 digits
        raise ValueError(" ".join(str(error).split())) from None
    except Exception as error:  # PyYAML lets through what Python says to `!!bool x`
        raise ValueError(f"a value is not what its tag says ({type(error).__name__})") from None


class _PlainLoader(yaml.SafeLoader):
    """YAML loader of lists, mappings and scalars only."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"line {self.peek_event().start_mark.line + 1} has an alias (*): write it out")
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml.YAMLError(f"lists and mappings are nested deeper than {DEEPEST} levels")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: {shown(twice)} stands twice in a mapping")
        return super().construct_mapping(node, deep)
