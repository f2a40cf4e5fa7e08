"""What xgrammar would ignore in a JSON schema, found before it does.

xgrammar compiles a schema whose keywords it does not enforce, and then allows text that is not valid. This is the list
of what it was seen to enforce (0.2.9); anything else is named, so that a caller can refuse it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NOTES = set(
    "title description default examples $schema $id $comment deprecated readOnly writeOnly $defs definitions".split()
)
BY_TYPE: dict[str, set[str]] = {
    "object": set(
        "properties required additionalProperties patternProperties propertyNames minProperties maxProperties".split()
    ),
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set(),
    "null": set(),
}
FORMATS = set("date time date-time duration email hostname ipv4 ipv6 uri uri-reference uuid json-pointer".split())


def unenforced(schema: Any, at: str = "#") -> Iterator[str]:
    """Places of a schema that xgrammar does not enforce.

    Args:
        schema: Parsed JSON schema.
        at: Where it stands.

    Yields:
        The keyword or combination and where it stands, such as "uniqueItems at #/properties/ids".
    """
    if not isinstance(schema, dict):
        return
    keys = set(schema) - NOTES
    for whole in ("$ref", "const", "enum", "anyOf"):
        if whole in keys:
            kinds, values = schema.get("type"), schema.get("enum", [schema.get("const")])
            matching = whole in ("const", "enum") and kinds is not None and all(_is(v, kinds) for v in values)
            rest = keys - {whole} - ({"type"} if matching else set())
            if rest:
                yield f"{', '.join(sorted(rest))} beside {whole} at {at}"
            break
    else:
        yield from _typed(schema, keys, at)
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        for key, below in (schema.get(name) or {}).items():
            yield from unenforced(below, f"{at}/{name}/{key}")
    for name in ("items", "additionalProperties", "propertyNames"):
        yield from unenforced(schema.get(name), f"{at}/{name}")
    for name in ("prefixItems", "anyOf"):
        for i, below in enumerate(schema.get(name) or ()):
            yield from unenforced(below, f"{at}/{name}/{i}")


def _typed(schema: dict[str, Any], keys: set[str], at: str) -> Iterator[str]:
    """The same for one schema that is neither a reference nor a list of values or of alternatives."""
    kinds = schema.get("type")
    names = [kinds] if isinstance(kinds, str) else list(kinds or ())
    known = {"type"}.union(*(BY_TYPE.get(name, set()) for name in names))
    if strange := sorted(keys - known):
        yield f"{', '.join(strange)}{'' if names else ' without a type'} at {at}"
    if missing := sorted(set(schema.get("required") or ()) - set(schema.get("properties") or ())):
        yield f"required names outside properties ({', '.join(missing)}) at {at}"
    if "multipleOf" in keys and ("number" in names or len(keys & BY_TYPE["integer"]) > 1):
        yield f"multipleOf beside a range, or for numbers, at {at}"
    if keys & {"pattern", "format"} and len(keys & BY_TYPE["string"]) > 1:
        yield f"pattern or format beside one another or a length at {at}"
    if "format" in keys and schema["format"] not in FORMATS:
        yield f"format {schema['format']!r} at {at}"
    patterns = [schema["pattern"]] if isinstance(schema.get("pattern"), str) else []
    for pattern in [*patterns, *(schema.get("patternProperties") or ())]:
        if '"' in pattern or any(mark in pattern for mark in ("\\\\", "\\x", "\\u")):
            yield f"quotes, backslashes or character codes in pattern {pattern!r} at {at}"  # written unescaped


def _is(value: Any, kinds: Any) -> bool:
    """A value is of one of the JSON types named."""
    names = [kinds] if isinstance(kinds, str) else list(kinds)
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean") in names
    if isinstance(value, int):
        return "integer" in names or "number" in names
    types: dict[type, str] = {float: "number", str: "string", list: "array", dict: "object"}
    return types[type(value)] in names
