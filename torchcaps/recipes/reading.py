"""Reading YAML that anybody may have written, in bounded time and memory."""

from typing import Any

import yaml

from torchcaps.utils.files import DEEPEST

MOST_CHARACTERS = 1_000_000
LONGEST = 100  # characters of a value that is no text, such as a number: longer ones take long to compute

RESOLVER = yaml.resolver.Resolver()


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Loader that refuses duplicate keys; YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise ValueError(f"the key {key.value!r} stands twice, in line {key.start_mark.line + 1}")
            keys.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """Return the content of a YAML text, or of a JSON text: texts, numbers, None, lists and dictionaries.

    Raises:
        ValueError: it is too long or nested too deeply, has a tag, an alias, a merge key or an endless number, or a key
            stands twice.
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
        elif isinstance(event, yaml.ScalarEvent) and event.implicit[0] and len(event.value) > LONGEST:
            kind = RESOLVER.resolve(yaml.ScalarNode, event.value, (True, False))
            if kind != RESOLVER.DEFAULT_SCALAR_TAG:
                raise ValueError(f"a number has more than {LONGEST} characters: {event.value[:20]}...")
        if tag := getattr(event, "tag", None):
            raise ValueError(f"a tag ({tag}) cannot be used: leave it out")
        if depth > DEEPEST:
            raise ValueError(f"its values are nested too deeply, in more than {DEEPEST} levels")
    try:
        return yaml.load(text, _Loader)
    except (LookupError, AttributeError, ArithmeticError, TypeError) as error:  # PyYAML's, for odd numbers and dates
        raise ValueError(f"a value cannot be read ({type(error).__name__}: {error})") from None


def _is_merge_key(event: yaml.Event) -> bool:
    if not isinstance(event, yaml.ScalarEvent):
        return False
    return event.tag == "tag:yaml.org,2002:merge" or (event.value == "<<" and event.implicit[0])
