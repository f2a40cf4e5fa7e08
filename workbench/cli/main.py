"""Entry point of ``workbench``: picks the verb, prints its outcome, and turns what went wrong into one sentence.

Exit codes: 0 done; 2 the request cannot be served as given; 130 interrupted; 1 a fault of the workbench itself.
Neither this module nor ``workbench --help`` imports torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches

from workbench import __version__
from workbench.cli.common import show, workplace
from workbench.cli.parser import spoken
from workbench.core.errors import UserError

VERBS = {
    "demo": "the whole job on the shipped checkpoint: decode, extract, replay, sweep, figures, a summary page",
    "generate": "decode one prompt, speculatively or plainly, and show every round",
    "generate-corpus": "answer prompts with the target, to train drafters on its own text",
    "extract": "write anchor records or a sequence store of a corpus, to train drafters on",
    "clean": "drop unusable, repeated and contaminated documents of a corpus, with a list of what went and why",
    "replay": "write the draft table and the NLL of a corpus",
    "sweep": "walk a grid of policies over draft tables, recommend one, write a page with sliders",
    "train": "build the demo corpus, train the demo checkpoint, average two checkpoints",
    "export": "write a dataset in the form that another project's trainer reads, and check it",
    "bench": "measure decode, replay and extraction on this machine",
    "info": "facts of a checkpoint, its cache, this machine and the shipped corpora",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after ``workbench``; None for those of the process.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = arguments[0] if arguments else ""
    try:
        if verb in ("-h", "--help", "help"):
            print(usage())
            return 0
        if verb in ("-V", "--version"):
            print(f"workbench {__version__}")
            return 0
        return _run(verb, arguments[1:])
    except SystemExit as stop:  # argparse, after it printed a help text
        return int(stop.code or 0)
    except UserError as error:
        return _refuse(str(error))
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader went away
            return 0
        where = f"{error.filename}: " if error.filename else ""
        return _refuse(f"{where}{error.strerror or error}: check the path, its permissions and the free space")
    except KeyboardInterrupt:
        print(f"\nworkbench {verb}: interrupted; {_go_on(verb)}", file=sys.stderr)
        return 130


def _run(verb: str, arguments: list[str]) -> int:
    """Run a verb; sentences of the Python API come out in the words of the command line."""
    if verb not in VERBS:
        near = get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        what = f"unknown verb {verb!r}" if verb else "a verb is needed"
        raise UserError(f"{what}: {hint}choose one of {', '.join(VERBS)}; `workbench --help` says what they do")
    module = importlib.import_module(f"workbench.cli.{_module(verb)}")
    args = module.read(arguments)
    names = {*vars(args), *(name for key, listed in vars(args).items() if key.endswith("names") for name in listed)}
    try:
        with workplace(args):
            outcome = module.run(args)
    except UserError as error:
        raise UserError(spoken(str(error), sorted(names))) from error
    show(outcome, as_json=args.json)
    return 0


def _module(verb: str) -> str:
    """The module of a verb."""
    return verb.replace("-", "_")


def _go_on(verb: str) -> str:
    """How to go on after an interruption."""
    return getattr(sys.modules.get(f"workbench.cli.{_module(verb)}"), "GO_ON", "nothing was written; run it again")


def _refuse(sentence: str) -> int:
    print(f"workbench: {' '.join(sentence.split())}", file=sys.stderr)
    return 2


def usage() -> str:
    """The help text of the command."""
    lines = ["usage: workbench VERB [options]", "", "A workbench for speculative decoding of Qwen3.5-class models.", ""]
    lines += [f"  {verb:<15} {about}" for verb, about in VERBS.items()]
    lines += [
        "",
        "Every verb takes --json, --out, --seed, --device, --threads and --quiet; those that run a model also",
    ]
    lines += ["--model, --dtype and --exact or --fast. `workbench VERB --help` lists all of its options."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
