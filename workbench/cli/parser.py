"""An argument parser that speaks in sentences: whatever it refuses is a ``UserError``, with what would be valid.

Values are converted by the functions below, so that a refusal names the value, the valid range and the remedy.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from workbench.core.errors import UserError

_ARGUMENT = re.compile(r"^argument (?P<name>[^:/]+?)(?:/[^:]*)?: ")
_VALUE = r"(None|True|False|'[^']*'|\[[^\]]*\]|[-+]?\w[\w.+-]*)"
_IN_CALL = re.compile(r"\b(?:corpus|generate|replay|extract)\(\.\.\., ([^()]*)\)")


class Parser(argparse.ArgumentParser):
    """The parser of one verb.

    Args:
        verb: Its name, such as "generate" or "train demo".
        about: What it does, a sentence or more.
        usage: What comes between the verb and its options.
    """

    def __init__(self, verb: str, about: str, *, usage: str = "") -> None:
        super().__init__(
            prog=f"workbench {verb}",
            usage=f"workbench {verb} {usage + ' ' if usage else ''}[options]",
            description=about,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found wrong, as a sentence."""
        name = _ARGUMENT.match(message)
        if name and "expected" in message:
            option = name["name"]
            raise UserError(f"{option} needs a value: write {option}=VALUE; `{self.prog} --help` says which are valid")
        if name and "not allowed with" in message:
            raise UserError(f"{name['name']} and {message.rpartition(' ')[2]} exclude each other: give one of them")
        if message.startswith("the following arguments are required: "):
            missing = message.partition(": ")[2]
            are, they, hold = ("are", "they", "hold") if "," in missing else ("is", "it", "holds")
            raise UserError(f"{missing} {are} needed: `{self.prog} --help` says what {they} {hold}")
        raise UserError(f"{name['name']} {message[name.end() :]}" if name else message)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse arguments, refusing what is unknown.

        Args:
            argv: The arguments after the verb.

        Returns:
            The values; options that mirror a function's hold only what was given.

        Raises:
            UserError: An option or a value is not valid.
        """
        args, unknown = self.parse_known_args(list(argv))
        options = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        for item in unknown:
            if not item.startswith("-") or item == "-":
                raise UserError(
                    f"unexpected argument {item!r}: quote a text of several words; see `{self.prog} --help`"
                )
            name = item.partition("=")[0]
            near = get_close_matches(name, options, n=1)
            valid = (
                f"did you mean {near[0]}? `{self.prog} --help` lists all" if near else "valid: " + ", ".join(options)
            )
            raise UserError(f"unknown option {name}: {valid}")
        return args


def spoken(message: str, names: Sequence[str]) -> str:
    """A sentence of the Python API in the words of the command line.

    Args:
        message: The sentence.
        names: Options of the verb, as Python spells them.

    Returns:
        The sentence with ``k=-1`` as ``--k -1``, ``carry=True`` as ``--carry``, ``carry=False`` as ``--no-carry``.
    """

    def option(found: re.Match[str]) -> str:
        flag, value = found[1].replace("_", "-"), found[2].strip("'")
        if value in ("True", "False"):
            return f"--{flag}" if value == "True" else f"--no-{flag}"
        if value.startswith("["):
            value = value[1:-1].replace(" ", "")
        return f"--{flag} {'none' if value == 'None' else value}"

    def listed(words: Sequence[str]) -> str:
        return "|".join(sorted(map(re.escape, words), key=len, reverse=True)) or "(?!)"

    long = [name for name in names if "_" in name]
    message = re.sub(rf"(?<![\w.-])({listed(names)})={_VALUE}", option, _IN_CALL.sub(r"\1", message))
    return re.sub(rf"(?<![\w./'-])({listed(long)})(?![\w./'-])", lambda m: "--" + m[1].replace("_", "-"), message)


def whole(text: str) -> int:
    """An integer, such as "128" or "65_536"."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: it must be an integer") from None


def real(text: str) -> float:
    """A number, such as "0.5"; bounds, NaN and infinity are checked where it is used."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: it must be a number") from None


def or_none(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """A converter that also takes "none"."""

    def inner(text: str) -> Any:
        if text.lower() == "none":
            return None
        try:
            return convert(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}, or none") from None

    return inner


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """A converter that takes one of a few words."""

    def inner(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is not valid: choose one of {', '.join(map(repr, choices))}")
        return text

    return inner
