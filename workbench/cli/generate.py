"""``workbench generate``: decode one prompt; the text goes to stdout, the summary to stderr, the strip to HTML.

With ``--stream`` the text is printed as it becomes certain.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cli.common import Outcome, add_common, load, plain, read_text
from workbench.cli.options import Kind, add_options, biases, given
from workbench.cli.page import page
from workbench.cli.parser import Parser
from workbench.core.errors import UserError
from workbench.core.manifest import write_atomic, write_json
from workbench.core.staging import check_new, staged

if TYPE_CHECKING:
    from workbench.model.hybrid import HybridModel
    from workbench.spec.grammars import Grammar
    from workbench.spec.result import Generation

GO_ON = "nothing was written; run it again, with a smaller --max-new-tokens if it took too long"


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the verb's arguments."""
    from workbench.spec.options import GenerateOptions

    parser = Parser(
        "generate", "Decode one prompt; drafting changes the speed, never the text or its law.", usage="[PROMPT]"
    )
    group = parser.add_argument_group("text")
    group.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; without it, --file or stdin is read")
    group.add_argument("--file", metavar="FILE", help="read the prompt from a file of UTF-8 text")
    group.add_argument("--force", metavar="FILE", help="commit this text after the prompt, whatever the target picks")
    group.add_argument("--html", metavar="FILE", help="write the text as a strip of tokens coloured by what each was")
    group.add_argument("--stream", action="store_true", help="print the text as it becomes certain")
    add_grammars(parser)
    names = add_options(
        parser,
        GenerateOptions,
        title="decoding",
        choices=decoding_choices(),
        kinds=decoding_kinds(),
        skip=("seed",),
    )
    add_common(
        parser,
        out="new directory for generation.json, rounds.parquet and strip.html",
        seed="of every draw under sampling; greedy decoding draws nothing (default: 0)",
    )
    parser.set_defaults(names=names)
    return parser.read(argv)


def run(args: argparse.Namespace) -> Outcome:
    """Decode, write what was asked for, and return text and summary."""
    from workbench.spec.generate import generate, make_options, stream

    forced = args.force is not None
    if args.stream and (forced or args.json):
        raise UserError("--stream goes neither with --force nor with --json: leave one of them out")
    chosen = given(args, args.names) | ({} if args.seed is None else {"seed": args.seed})
    options = make_options(None, chosen, full_force=forced)
    if not options.adaptive and (idle := {"cap", "floor_context"} & set(chosen)):
        raise UserError(f"--{min(idle).replace('_', '-')} needs --adaptive: it bounds the adaptive draft length")
    prompt, force = _prompt(args), read_text(args.force, "--force") if forced else None
    out = None if args.out is None else check_new(Path(args.out))
    html = None if args.html is None else _file(args.html)
    model = load(args)
    if model.tokenizer is None:
        raise UserError(f"checkpoint {args.model!r} has no tokenizer, so text cannot be decoded with it: add its "
                        "tokenizer.json, or give token ids in Python")  # fmt: skip
    ids = None if force is None else model.tokenizer.encode(force)
    result: Generation | None = None
    if ids is not None and prompt is None:
        if len(ids) < 2:
            raise UserError(f"--force {args.force!r} holds {len(ids)} tokens: without a prompt it takes at least two")
        first, ids = ids[:1], ids[1:]
        result = generate(model, first, options=options, force=ids)
    else:
        grammar = read_grammar(args, model)
        if args.stream:
            for chunk in stream(model, prompt or "", options=options, grammar=grammar):
                print(chunk.text, end="", file=args.stdout, flush=True)
                result = chunk.generation
            print(file=args.stdout)
        else:
            result = generate(model, prompt or "", options=options, force=ids, grammar=grammar)
    assert result is not None
    summary = {"prompt_tokens": len(result.prompt), **result.summary}
    data = {"text": result.text, "summary": summary, "token_ids": list(result.tokens)}
    strip = page("A generation", result._repr_html_())
    if out is not None:
        with staged(out) as stage:
            rounds = [record.row() for record in result.records]
            write_json(stage / "generation.json", plain({**data, "rounds": rounds}))
            result.rounds.write_parquet(stage / "rounds.parquet")
            write_atomic(stage / "strip.html", strip.encode())
    if html is not None:
        write_atomic(html, strip.encode())
    written = [str(path) for path in (out, html) if path is not None]
    notes = [*summary_lines(summary), *(f"written: {path}" for path in written)]
    text = "" if args.stream else result.text
    return Outcome({"verb": "generate", **data, "written": written}, text, notes)


def summary_lines(s: dict[str, Any]) -> list[str]:
    """What a generation's summary says, in lines."""
    speed = f", {s['tokens_per_second']:.1f} tokens/s" if s["tokens_per_second"] else ""
    numerics = "exact" if s["exact"] else "fast"
    lines = [f"{s['tokens']} tokens after {s['prompt_tokens']} of prompt ({s['finish']}; {numerics} numerics){speed}"]
    if s["drafted"]:
        joint = " ".join(f"{share:.2f}" for share in s["joint"])
        lines.append(
            f"{s['rounds']} rounds: {s['accepted']} of {s['drafted']} drafts accepted, {s['tau']:.2f} a round without "
            f"bonus; joint by slot: {joint}"
        )
    if s["repeated_8grams"]:
        lines.append(f"{100 * s['repeated_8grams']:.0f} % of the 8-grams repeat earlier ones: a loop is easy to draft")
    return lines


def add_grammars(parser: Parser) -> None:
    """Add the options that say what the text must match; one of them at most."""
    group = parser.add_argument_group("grammar (extra `formats`)")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--json-schema", metavar="FILE", help="the text is JSON that this schema allows")
    one.add_argument("--regex", metavar="PATTERN", help="the text matches this regular expression as a whole")
    one.add_argument("--lark", metavar="FILE", help="the text follows this Lark grammar")
    one.add_argument("--choice", action="append", metavar="TEXT", help="the text is one of these; give it repeatedly")
    group.add_argument("--grammar-engine", default="llguidance", metavar="{llguidance,xgrammar}",
                       help="the library that reads the grammar (default: llguidance)")  # fmt: skip


def read_grammar(args: argparse.Namespace, model: HybridModel) -> Grammar | None:
    """The grammar that the options describe; None for none."""
    from workbench.spec import grammars

    about: dict[str, Any] = {
        "vocab_size": model.config.vocab_size,
        "eos_ids": model.config.eos_token_id,
        "engine": args.grammar_engine,
    }
    if args.json_schema is not None:
        return grammars.json_schema(read_text(args.json_schema, "--json-schema"), model.tokenizer, **about)
    if args.regex is not None:
        return grammars.regex(args.regex, model.tokenizer, **about)
    if args.lark is not None:
        return grammars.lark(read_text(args.lark, "--lark"), model.tokenizer, **about)
    if args.choice is not None:
        return grammars.choice(args.choice, model.tokenizer, **about)
    return None


def decoding_choices() -> dict[str, tuple[str, ...]]:
    """Valid words of the options of decoding."""
    from workbench.cache.formats import FORMATS
    from workbench.cache.hybrid import STRATEGIES
    from workbench.model.hybrid import CARRIERS
    from workbench.sampling.options import ORDERS
    from workbench.spec.choose import ACCEPT_RULES
    from workbench.spec.policies.arrays import STATISTICS

    return {
        "carrier": CARRIERS,
        "strategy": STRATEGIES,
        "k_format": tuple(FORMATS),
        "v_format": tuple(FORMATS),
        "filter_order": ORDERS,
        "accept": ACCEPT_RULES,
        "p_min_reads": STATISTICS,
    }


def decoding_kinds() -> dict[str, Kind]:
    """Readers of options of decoding whose annotation says too little."""
    return {
        "logit_bias": Kind(biases, "ID:BIAS,..."),
        "stop": Kind(lambda text: (text,), "TEXT"),
        "stop_token_ids": Kind(_ids, "ID,..."),
    }


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(i) for i in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: write token ids as 12,13") from None


def _prompt(args: argparse.Namespace) -> str | None:
    """The prompt from the argument, the file or stdin; None when the forced text alone was given."""
    if args.prompt is not None and args.file is not None:
        raise UserError("PROMPT and --file exclude each other: give one of them")
    if args.file is not None:
        return read_text(args.file, "--file")
    if args.prompt not in (None, "-"):
        return args.prompt
    if args.prompt is None and args.force is not None:
        return None
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("a prompt is needed: write it after `workbench generate`, name a --file, or pipe it in")
    return sys.stdin.read()


def _file(path: str) -> Path:
    """A file to write, its folder there."""
    file = Path(path)
    if file.is_dir() or not file.parent.is_dir():
        why = "is a directory" if file.is_dir() else "lies in a directory that does not exist"
        raise UserError(f"--html {path!r} {why}: give the name of a file to write")
    return file
