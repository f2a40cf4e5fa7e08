"""A corpus that the target writes itself: prompts answered by speculative decoding, to Arrow shards.

Every answer draws from a random stream of its own, which is a hash of its prompt's id, so that no answer depends on
which prompts come before it or on where a run was interrupted. One session answers them all, emptied between them, so
that its memory and, on a GPU, its captured rounds are used again. Ids are stored as they were generated and are never
made from text again. What ends an answer is told apart: the template's end of a turn, the checkpoint's end of a text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.errors import UserError, check_flag, check_int
from workbench.core.tape import Corpus, Tape
from workbench.corpus.build import corpus
from workbench.corpus.chat import end_of_turn
from workbench.corpus.ondisk import KIND
from workbench.corpus.sources import Quarantine, in_quarantine, set_aside
from workbench.datasets.extract import numerical_class
from workbench.datasets.provenance import as_corpus, check_tapes, new_manifest
from workbench.datasets.shards import ShardDirectory, load_shards, plan_shards
from workbench.model.fingerprint import fingerprint
from workbench.model.hybrid import HybridModel
from workbench.sampling.options import Shaping
from workbench.spec.generate import generate, make_options
from workbench.spec.options import HOST_ONLY, GenerateOptions
from workbench.spec.own import own_mark
from workbench.spec.result import Generation
from workbench.spec.session import Session

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

STREAM = 8  # rounds that a GPU runs before the host reads what they did
FINISH = ("end_of_turn", "end_of_text", "stop_token", "stop_string", "length", "context")
_SHAPED = {field.name for field in fields(Shaping)} | {"filter_order"}


@dataclass(frozen=True)
class Ends:
    """What ends an answer.

    Args:
        turn: The template's end-of-turn token; None where it has none or is not asked for.
        text: The checkpoint's end-of-text tokens; those that end a turn too count as ends of a turn.
    """

    turn: int | None
    text: tuple[int, ...]

    def of(self, made: Generation, *, cut: bool) -> str:
        """Why a generation ended, one of ``FINISH``; ``cut`` says that the context was shorter than the budget."""
        if made.finish != "stop":
            return "context" if cut and made.finish == "length" else made.finish
        last = made.tokens[-1]
        return "end_of_turn" if last == self.turn else "end_of_text" if last in self.text else "stop_token"


def generate_corpus(
    model: HybridModel,
    prompts: Corpus | Sequence[Tape] | Tape,
    *,
    out: str | Path,
    options: GenerateOptions | None = None,
    shard_rows: int = 64,
    turn_ends: bool = True,
    chat_template: str | Path | None = None,
    template_options: Mapping[str, Any] | None = None,
    exact: bool | None = None,
    resume: bool = True,
    quarantine: Quarantine | None = None,
    **given: object,
) -> Corpus:
    """Answer prompts with the target, by speculative decoding, and open the answers as a corpus.

    A run that was killed goes on after its last whole shard when called again, and ends with the same bytes. On a GPU
    rounds run as CUDA graphs, several between two readings, unless an option needs the host in every round. The caches
    have room for the longest prompt and its answer from the first prompt on.

    Args:
        model: The target.
        prompts: What it is asked, such as ``wb.prompts`` returns; of a tape with a longer text, its prompt.
        out: Directory for shards and manifest.
        options: How to decode, all options at once; else by name.
        shard_rows: Answers per shard, which is what a killed run may lose; default 64.
        turn_ends: End an answer at the chat template's end-of-turn token too, if it has one.
        chat_template: The template that the prompts were rendered by, a file or the template; None for the
            checkpoint's own.
        template_options: What else the template was given by name.
        exact: Numerical class; None for the model's own.
        resume: Go on with a directory that an equal run left; False refuses one that holds anything.
        quarantine: Prompts that this model cannot answer, such as those that fill its context, are appended here as
            (doc_id, reason) and left out; None stops at the first.
        **given: Options of ``GenerateOptions`` by name. Draft length defaults to 3 where the checkpoint can draft;
            ``sequence`` is set per prompt.

    Returns:
        Tapes of prompt and answer in the order of the prompts, the answer supervised, marked as the target's own.

    Raises:
        UserError: An option, a prompt or the directory is not valid; nothing is left behind then.
    """
    check_int("shard_rows", shard_rows, low=1)
    check_flag("turn_ends", turn_ends)
    given_prompts = as_corpus(prompts)
    opts = answer_options(model, options, given)
    ends = _ends(model, opts, turn_ends, chat_template, template_options)
    if ends.turn is not None:
        opts = replace(opts, stop_token_ids=tuple(dict.fromkeys((*opts.stop_token_ids, ends.turn))))
    asked, budgets = _answerable(model, given_prompts, opts.max_new_tokens, quarantine)
    capacity = max(tape.prompt_len + budget for tape, budget in zip(asked, budgets, strict=True))
    schema, here = answer_schema(), fingerprint(model)
    with numerical_class(model, exact):
        manifest = new_manifest(KIND, model, asked, parameters=_parameters(opts, shard_rows, ends))
        plan = plan_shards([1] * len(asked), shard_rows)
        with ShardDirectory(Path(out), manifest, plan=plan, schema=schema, resume=resume) as directory:

            @cache
            def session() -> Session:
                return Session(model, options=opts, capacity=capacity)

            def answers(span: slice, bar: Any) -> Iterator[pa.RecordBatch]:
                for i in range(span.start, span.stop):
                    yield _answer(session(), asked[i], budgets[i], opts, ends, here, schema)
                    bar.update(budgets[i])

            directory.fill(answers, sizes=budgets, desc="answer")
            directory.finish({"documents": len(asked), "records": len(asked)})
    return corpus(out)


def load_answers(path: str | Path, *, check_hashes: bool = True) -> datasets.Dataset:
    """Open what ``generate_corpus`` wrote with all its columns, memory-mapped.

    Args:
        path: The directory.
        check_hashes: Compare every file with its hash in the manifest; default True.

    Returns:
        One row per answer: ids, prompt_len, why it ended, its random stream, its rounds and drafts.

    Raises:
        CheckpointError: It is no such directory, is incomplete, or its bytes have changed.
    """
    return load_shards(path, kind=KIND, check_hashes=check_hashes)


def answers_summary(records: datasets.Dataset) -> dict[str, Any]:
    """What a generated corpus holds.

    Args:
        records: From ``load_answers``.

    Returns:
        Answers, their tokens, how many ended why, and rounds, drafted and accepted tokens with tau, their quotient of
        accepted and rounds (pooled, without the bonus; None without rounds).
    """
    lengths = np.asarray([len(tokens) for tokens in records["tokens"]])
    counts = Counter(records["finish"])
    sums = {name: int(np.sum(records[name])) for name in ("rounds", "drafted", "accepted")}
    return {
        "answers": len(records),
        "prompt_tokens": int(np.sum(records["prompt_len"])),
        "answer_tokens": int(lengths.sum() - np.sum(records["prompt_len"])),
        "finish": {name: counts[name] for name in FINISH if counts[name]},
        **sums,
        "tau": sums["accepted"] / sums["rounds"] if sums["rounds"] else None,
    }


def answer_schema() -> pa.Schema:
    """Columns of an answer; ``own`` is the JSON text of what ``Own`` holds."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("doc_id", pa.string()),
            pa.field("split", pa.string()),
            pa.field("source", pa.string()),
            pa.field("prompt_len", pa.int32()),
            pa.field("tokens", pa.list_(pa.int32())),
            pa.field("supervised", pa.list_(pa.bool_())),
            pa.field("finish", pa.string()),
            pa.field("sequence", pa.int64()),
            pa.field("rounds", pa.int32()),
            pa.field("drafted", pa.int32()),
            pa.field("accepted", pa.int32()),
            pa.field("own", pa.string()),
        ]
    )


def sequence_of_prompt(doc_id: str) -> int:
    """Random stream of a prompt's answer: 63 bits of a hash of its id."""
    return int.from_bytes(sha256(f"answer:{doc_id}".encode()).digest()[:8], "big") >> 1


def answer_options(model: HybridModel, options: GenerateOptions | None, given: dict[str, object]) -> GenerateOptions:
    """The options of a run: what was given, a draft length where the checkpoint can draft, rounds on a GPU.

    Raises:
        UserError: An option is not valid, or is set per prompt.
    """
    if "sequence" in given or (options is not None and options.sequence):
        raise UserError("sequence is set per prompt, as a hash of its id: give seed to draw other answers")
    if options is None and "k" not in given:
        given = {**given, "k": 3 if model.can_draft else 0}
    opts = make_options(options, given, full_force=False)
    placed = options is not None or "graphs" in given or "stream_rounds" in given
    return opts if placed or not model.through_kernels else on_device(opts)


def on_device(options: GenerateOptions) -> GenerateOptions:
    """The same options with rounds on the GPU, or as they are where one of them needs the host in every round."""
    plain = {field.name: field.default for field in fields(GenerateOptions)}
    needs_host = any(getattr(options, name) != plain[name] for name in HOST_ONLY)
    if needs_host or (options.accept == "ratio" and options.temperature > 0):
        return options
    return replace(options, graphs=True, stream_rounds=STREAM)


def _ends(
    model: HybridModel,
    options: GenerateOptions,
    turn_ends: bool,
    chat_template: str | Path | None,
    template_options: Mapping[str, Any] | None,
) -> Ends:
    tokenizer, turn = model.tokenizer, None
    if tokenizer is not None and chat_template is not None:
        tokenizer = tokenizer.with_template(chat_template)
    if turn_ends and not options.ignore_eos and tokenizer is not None and tokenizer.config.get("chat_template"):
        turn = end_of_turn(tokenizer, template_options)
    return Ends(turn, tuple(model.config.eos_token_id))


def _answerable(
    model: HybridModel, asked: Corpus, max_new_tokens: int, quarantine: Quarantine | None
) -> tuple[Corpus, list[int]]:
    """The prompts that the model can answer, and how many tokens each answer may have."""
    kept: list[Tape] = []
    budgets: list[int] = []
    for tape in asked:
        try:
            budget = _budget(model, tape, max_new_tokens)
            check_tapes(model, Corpus([tape]))
        except UserError as error:
            set_aside(quarantine, tape.doc_id, error)
            continue
        kept.append(tape)
        budgets.append(budget)
    if not kept:
        raise UserError(f"no prompt can be answered{in_quarantine(quarantine)}")
    left = Corpus(kept, name=asked.name, tokenizer=asked.tokenizer)
    check_tapes(model, left)
    return left, budgets


def _budget(model: HybridModel, tape: Tape, max_new_tokens: int) -> int:
    """Tokens that an answer may have."""
    if not tape.prompt_len:
        raise UserError(
            f"document {tape.doc_id!r} has no prompt (prompt_len is 0): read prompts with workbench.prompts(...), "
            "where prompt_tokens=N takes the beginning of a text"
        )
    room = model.config.max_position_embeddings - tape.prompt_len
    if room < 1:
        raise UserError(
            f"the prompt of document {tape.doc_id!r} has {tape.prompt_len} tokens, which leaves no room for an answer "
            f"in this model's context of {model.config.max_position_embeddings}: give prompts(..., max_prompt=...)"
        )
    return min(max_new_tokens, room)


def _parameters(options: GenerateOptions, shard_rows: int, ends: Ends) -> dict[str, Any]:
    """Everything that shapes the answers, for the manifest."""
    named = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _SHAPED | {"sequence"}}
    end = {"end_of_turn": ends.turn, "end_of_text": list(ends.text)}
    return {**named, "shaping": options.shaping().key(), **end, "shard_rows": shard_rows}


def _answer(
    session: Session, tape: Tape, budget: int, options: GenerateOptions, ends: Ends, here: str, schema: pa.Schema
) -> pa.RecordBatch:
    """The record of one answer, made in a session that is emptied for it."""
    import pyarrow as pa

    prompt, sequence = tape.tokens[: tape.prompt_len].tolist(), sequence_of_prompt(tape.doc_id)
    own_options = replace(options, max_new_tokens=budget, sequence=sequence)
    try:
        made = generate(session.state.model, prompt, options=own_options, session=session)
    except UserError as error:
        error.args = (f"document {tape.doc_id!r}: {error}",)
        raise
    mark = own_mark(options, here, sequence, drafts=options.k > 0)
    tokens = [*made.prompt, *made.tokens]
    values = {
        "doc_id": tape.doc_id,
        "split": tape.split,
        "source": tape.source,
        "prompt_len": len(prompt),
        "tokens": tokens,
        "supervised": [i >= len(prompt) for i in range(len(tokens))],
        "finish": ends.of(made, cut=budget < options.max_new_tokens),
        "sequence": sequence,
        "rounds": len(made.records),
        "drafted": sum(record.drafted for record in made.records),
        "accepted": sum(record.accepted for record in made.records),
        "own": json.dumps(mark.facts(), sort_keys=True),
    }
    return pa.RecordBatch.from_arrays([pa.array([values[c.name]], c.type) for c in schema], schema=schema)
