"""What every verb shares: common options, threads, loading, corpora, and how an outcome is printed and written."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cli.options import add_options, given, template_kinds
from workbench.cli.parser import Parser, one_of, whole
from workbench.core.errors import UserError, check_int
from workbench.core.progress import quiet

if TYPE_CHECKING:
    from workbench.core.tape import Corpus
    from workbench.model.hybrid import HybridModel
    from workbench.model.weights.text import TextSide

DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True)
class Outcome:
    """What a verb has to say.

    Args:
        data: The one JSON object of ``--json``.
        text: What goes to stdout without it.
        notes: Lines for stderr, beside the text.
    """

    data: Mapping[str, Any]
    text: str
    notes: list[str] = field(default_factory=list)


def add_common(
    parser: Parser,
    *,
    out: str,
    seed: str,
    required: bool = False,
    model: bool = True,
    threads: bool = True,
    device: str = "where to run (default: cpu)",
) -> None:
    """Add the options that every verb takes; what has no effect on a verb says so in its help.

    Args:
        parser: The verb's parser.
        out: What ``--out`` is for.
        seed: What ``--seed`` is for.
        required: Whether ``--out`` must be given.
        model: Add the options of a verb that runs a model: ``--model``, ``--draft-vocab``, ``--dtype`` and ``--exact``
            or ``--fast``.
        threads: Add ``--threads N``; False where the verb adds its own.
        device: What ``--device`` is for.
    """
    group = parser.add_argument_group("common options")
    if model:
        group.add_argument(
            "--model", default="demo", metavar="SOURCE", help="demo, a directory or a hub id (default: demo)"
        )
        group.add_argument(
            "--draft-vocab",
            metavar="FILE|none",
            help="draft the ids of this file alone, as save_draft_vocab wrote it; none for all ids (default: the file "
            "beside the checkpoint, if there is one)",
        )
        group.add_argument(
            "--dtype",
            type=one_of(DTYPES),
            metavar="{" + ",".join(DTYPES) + "}",
            help="type of the weights (default: float32 on a CPU, bfloat16 on a GPU)",
        )
        mode = group.add_mutually_exclusive_group()
        for flag, value, where in (("--exact", True, "CPU"), ("--fast", False, "GPU")):
            text = f"{flag[2:]} numerics (default on a {where})"
            mode.add_argument(flag, dest="exact", action="store_const", const=value, help=text)
    group.add_argument("--device", type=one_of(DEVICES), metavar="{" + ",".join(DEVICES) + "}", help=device)
    if threads:
        group.add_argument("--threads", type=whole, metavar="N", help="threads of torch (default: torch's own choice)")
    group.add_argument("--seed", type=whole, metavar="N", help=seed)
    group.add_argument("--out", required=required, metavar="PATH", help=out)
    group.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    group.add_argument("--quiet", action="store_true", help="no progress on stderr")


@contextmanager
def workplace(args: argparse.Namespace) -> Iterator[None]:
    """Run a verb with its threads and its progress; whatever it prints goes to stderr, stdout is for the outcome.

    ``args.stdout`` is left for a verb whose outcome is shown as it comes.
    """
    args.stdout = sys.stdout
    if args.seed is not None:
        check_int("seed", args.seed, low=0)
    threads = getattr(args, "threads", None)
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))
        if args.quiet:
            stack.enter_context(quiet())
        if isinstance(threads, int):
            check_int("threads", threads, low=1)
            import torch

            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(threads)
        yield


def load(args: argparse.Namespace) -> HybridModel:
    """The model of ``--model``, with ``--draft-vocab``, ``--device``, ``--dtype`` and ``--exact`` or ``--fast``."""
    from workbench.facade import load as load_model

    model = load_model(args.model, device=args.device, dtype=args.dtype, exact=args.exact)
    if args.draft_vocab == "none":
        model.untrim_draft_vocab()
    elif args.draft_vocab is not None:
        model.trim_draft_vocab(Path(args.draft_vocab))
    return model


def add_corpus(parser: Parser) -> None:
    """Add ``--corpus`` and the options of ``workbench.corpus``."""
    from workbench.corpus import corpus
    from workbench.corpus.cut import OVERFLOW

    names = add_options(
        parser,
        corpus,
        title="corpus",
        skip=("tokenizer", "seed", "quarantine"),
        choices={"overflow": OVERFLOW},
        kinds=template_kinds(),
        defaults={"max_tokens": "the model's context"},
    )
    parser.add_argument(
        "--corpus",
        default="demo",
        metavar="SOURCE",
        help="demo, demo/REGISTER, a file or directory of text, .jsonl or .parquet, or a saved dataset (default: demo)",
    )
    parser.set_defaults(corpus_names=names)


def read_corpus(
    args: argparse.Namespace, model: HybridModel | TextSide, *, quarantine: list[tuple[str, str]] | None = None
) -> Corpus:
    """The tapes that the corpus options describe, cut to the model's context unless told otherwise.

    Args:
        args: The verb's arguments.
        model: Whose tokenizer and context they take.
        quarantine: Takes (doc_id, reason) of documents that cannot be used; None stops at the first.

    Returns:
        The tapes.
    """
    from workbench.corpus import corpus

    options = {"max_tokens": model.config.max_position_embeddings, **given(args, args.corpus_names)}
    if args.seed is not None:
        options["seed"] = args.seed
    return corpus(args.corpus, tokenizer=model.tokenizer, quarantine=quarantine, **options)


def show(outcome: Outcome, *, as_json: bool) -> None:
    """Print an outcome: one JSON object, or its text, and its notes on stderr."""
    for note in outcome.notes:
        print(note, file=sys.stderr)
    if as_json:
        print(json.dumps(plain(outcome.data), ensure_ascii=False, allow_nan=False))
    elif outcome.text:
        print(outcome.text)
    sys.stdout.flush()


def counted(number: int, what: str) -> str:
    """A number of things, such as "1 shard" and "1,024 shards"."""
    return f"{number:,} {what}{'s'[: number != 1]}"


def plain(value: Any) -> Any:
    """A value as JSON holds it: mappings and lists of plain values, None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "item"):
        return plain(value.item())
    return str(value)


def read_text(path: str, option: str) -> str:
    """The text of a file that an option names.

    Args:
        path: The file.
        option: The option, for the sentence.

    Returns:
        Its text.

    Raises:
        UserError: It is no file, or not UTF-8.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{option} {path!r} is not valid: there is no such file; give a file of UTF-8 text")
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{option} {path!r} is not UTF-8 text ({error.reason} at byte {error.start}): convert it"
        ) from None
