"""Reading YAML that anybody may have written, in bounded time and memory."""

from typing import Any

import yaml

MOST_CHARACTERS, DEEPEST = 1_000_000, 50


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Loader that refuses a key that stands twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise ValueError(f"the key {key.value!r} stands twice, in line {key.start_mark.line + 1}")
            keys.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """Return the content of a YAML text, or of a JSON text. Tags that make other objects than plain ones are refused.

    Raises:
        ValueError: it is too long or nested too deeply, has an alias or a merge key, or a key stands twice.
        yaml.YAMLError: it is not valid YAML.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it is longer than {MOST_CHARACTERS:,} characters")
    depth = 0
    for event in yaml.parse(text, _Loader):  # before anything is built
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent) or _is_merge_key(event):
            raise ValueError("an alias (*NAME) or a merge key (<<) cannot be used: write the values out")
        if depth > DEEPEST:
            raise ValueError(f"its values are nested too deeply, in more than {DEEPEST} levels")
    return yaml.load(text, _Loader)


def _is_merge_key(event: yaml.Event) -> bool:
    if not isinstance(event, yaml.ScalarEvent):
        return False
    return event.tag == "tag:yaml.org,2002:merge" or (event.value == "<<" and event.implicit[0])
