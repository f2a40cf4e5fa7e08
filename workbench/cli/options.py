"""Options of a verb, made from what the Python API takes: a frozen dataclass, or a function's keyword arguments.

Names, types and defaults come from the signature, help texts from the ``Args`` of the docstring. The parsed values
hold only what was given, so that every default is the API's own.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from workbench.cli.parser import Parser, one_of, or_none, real, whole

_ARG = re.compile(r"^    (\*{0,2}\w+): (.*)$")


@dataclass(frozen=True)
class Kind:
    """How one option is read from text.

    Args:
        convert: Text to value.
        metavar: What stands for the value in the help.
    """

    convert: Callable[[str], Any]
    metavar: str


def add_options(
    parser: Parser,
    of: Callable[..., Any],
    *,
    title: str,
    skip: Collection[str] = (),
    only: Collection[str] | None = None,
    choices: Mapping[str, Sequence[str]] | None = None,
    kinds: Mapping[str, Kind] | None = None,
    defaults: Mapping[str, str] | None = None,
) -> list[str]:
    """Add an option per field of a dataclass, or per keyword argument of a function.

    Args:
        parser: The verb's parser.
        of: The dataclass or function.
        title: Heading of the options in the help.
        skip: Names that are no options here.
        only: Names that are; None for all with a default.
        choices: Valid words of options whose annotation does not say.
        kinds: Readers of options whose annotation says too little.
        defaults: Texts for the help where the verb's default is not the API's.

    Returns:
        The names added.
    """
    group = parser.add_argument_group(title)
    docs, words, added = arg_docs(of), dict(choices or {}), []
    for name, parameter in inspect.signature(of).parameters.items():
        wanted = name in only if only is not None else parameter.default is not inspect.Parameter.empty
        if not wanted or name in skip:
            continue
        flag, default = "--" + name.replace("_", "-"), parameter.default
        text = _help(docs.get(name, ""), flag, (defaults or {}).get(name), default)
        hint = _resolved(of, parameter.annotation)
        if hint is bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, dest=name, action=action, default=argparse.SUPPRESS, help=text)
        else:
            kind = (kinds or {}).get(name) or kind_of(hint, words.get(name))
            group.add_argument(
                flag, dest=name, type=kind.convert, metavar=kind.metavar, default=argparse.SUPPRESS, help=text
            )
        added.append(name)
    return added


def given(args: argparse.Namespace, names: Collection[str]) -> dict[str, Any]:
    """What was given of these options, by name."""
    return {name: value for name, value in vars(args).items() if name in names}


def kind_of(hint: Any, choices: Sequence[str] | None = None) -> Kind:
    """The reader of an annotation: int, float, str, a Literal of words, or one of them and None.

    Args:
        hint: The annotation.
        choices: Valid words, when the annotation does not say.

    Returns:
        The reader.
    """
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    optional = type(None) in parts
    inner = [part for part in parts if part is not type(None)]
    words = tuple(choices or ()) or tuple(w for part in inner if get_origin(part) is Literal for w in get_args(part))
    if words:
        found = Kind(one_of(words), "{" + ",".join(words) + "}")
    elif int in inner:
        found = Kind(whole, "N")
    elif float in inner:
        found = Kind(real, "X")
    else:
        found = Kind(str, "TEXT")
    return Kind(or_none(found.convert), found.metavar + "|none") if optional else found


def arg_docs(of: Callable[..., Any]) -> dict[str, str]:
    """The ``Args`` of a docstring: name to text, each in one line."""
    out: dict[str, str] = {}
    name, inside = "", False
    for line in inspect.cleandoc(of.__doc__ or "").splitlines():
        if line and not line.startswith(" "):
            inside, name = line == "Args:", ""
        elif inside and (found := _ARG.match(line)):
            name = found[1].lstrip("*")
            out[name] = found[2].strip()
        elif inside and name and line.strip():
            out[name] += " " + line.strip()
    return out


def _resolved(of: Callable[..., Any], annotation: Any) -> Any:
    """An annotation as an object; those of a module with postponed evaluation are text, also where it is inherited."""
    if not isinstance(annotation, str):
        return annotation
    names: dict[str, Any] = {}
    for kind in reversed(of.__mro__) if isinstance(of, type) else [of]:
        names |= vars(sys.modules[kind.__module__])
    return eval(annotation, names)


def _help(text: str, flag: str, instead: str | None, default: Any) -> str:
    """A help text in the words of the command line, with the default at its end."""
    text = re.sub(r"``(\w+)``", lambda found: "--" + found[1].replace("_", "-"), text)
    text = re.sub(r"\bFalse\b", f"--no-{flag[2:]}", re.sub(r"\bNone\b", "none", text))
    text = re.sub(r"(^|[;.,] )default [^;]*?\.?$", ".", text, flags=re.IGNORECASE).removeprefix(".").strip()
    if instead is None and default is not inspect.Parameter.empty:
        words = {True: "yes", False: "no", None: "none", "": "none", (): "none"}
        named = default is None or isinstance(default, bool) or default in ("", ())
        instead = words[default] if named else f"{default}"
    return (text + (f" (default: {instead})" if instead else "")).strip().replace("%", "%%")


def biases(text: str) -> tuple[tuple[int, float], ...]:
    """Token ids and biases, read from text such as 12:-1.5,13:2."""
    try:
        return tuple((int(i), float(b)) for i, b in (pair.split(":") for pair in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not valid: write token ids and biases as 12:-1.5,13:2, with -inf to forbid one"
        ) from None


def reals(text: str) -> tuple[float, ...]:
    """Numbers, read from text such as 0.7,1."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: write numbers as 0.7,1") from None


def mapping(text: str) -> dict[str, Any]:
    """Names and values, read from JSON text such as {"enable_thinking": false}."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f'{text!r} is not valid: write a JSON object such as {{"enable_thinking": false}}'
        )
    return value


def template_kinds() -> dict[str, Kind]:
    """Readers of the options of chat templates."""
    return {"chat_template": Kind(str, "FILE"), "template_options": Kind(mapping, "JSON")}
