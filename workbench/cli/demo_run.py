"""The steps of the demo: each fills one attribute of ``Demo``, writes its files, and keeps the numbers worth saying.

What depends on the clock goes to ``timings.json`` and ``rounds.parquet``; every other file is the same for the same
options, model, machine kind and thread count, and the manifest lists its hash.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cli.common import plain
from workbench.core.errors import UserError, check_int
from workbench.core.frames import phases_frame
from workbench.core.manifest import Manifest, git_state, sha256_file, write_json
from workbench.core.metrics import acceptance
from workbench.core.progress import progress
from workbench.core.tape import Corpus, Own, Tape

if TYPE_CHECKING:
    import polars as pl

    from workbench.model.hybrid import HybridModel
    from workbench.replay import DraftTable
    from workbench.spec.result import Generation

P_MIN = (0.0, 0.3, 0.5, 0.7)
HASHED = ("own.jsonl", "sweep.parquet", "nll.parquet", "anchors/manifest.json", "table/manifest.json",
          "own-table/manifest.json")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Sizes of the demo.

    Args:
        prompts: Prompts to decode, the same number per register as far as it goes.
        max_new_tokens: Tokens to generate per prompt.
        k: Draft length of the live runs.
        documents: Held-out documents to extract and replay, the same number per register as far as it goes.
        max_tokens: Tokens taken from the beginning of each document.
        gamma: Slots per anchor record.
        k_max: Draft slots of the table; the sweep goes up to it.
        seed: Choice of prompts, documents and anchors.
    """

    prompts: int = 5
    max_new_tokens: int = 64
    k: int = 3
    documents: int = 10
    max_tokens: int = 320
    gamma: int = 5
    k_max: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("prompts", self.prompts, low=1)
        check_int("max_new_tokens", self.max_new_tokens, low=2)
        check_int("k_max", self.k_max, low=1, high=32)
        check_int("k", self.k, low=1, high=self.k_max, hint="k_max is the longest draft the table records")
        check_int("documents", self.documents, low=1)
        check_int("gamma", self.gamma, low=1)
        check_int("max_tokens", self.max_tokens, low=self.gamma + 2, hint="a record needs gamma + 2 tokens")
        check_int("seed", self.seed, low=0)


QUICK = DemoOptions(prompts=2, max_new_tokens=16, documents=4, max_tokens=64, k_max=4)


class Demo:
    """One run of the demo.

    Args:
        model: The target, with tokenizer and MTP head.
        options: Its sizes.
        out: Directory to write into.
    """

    def __init__(self, model: HybridModel, options: DemoOptions, out: Path) -> None:
        self.model, self.options, self.out = model, options, out
        self.live: list[Generation] = []
        self.anatomy: Generation
        self.speeds: dict[str, float] = {}
        self.same = 0
        self.tapes: Corpus
        self.own: Corpus
        self.records = 0
        self.table: DraftTable
        self.own_table: DraftTable
        self.agreed: tuple[int, int] = (0, 0)
        self.grid: pl.DataFrame
        self.manifest: Manifest

    def decode(self) -> None:
        """Decode every prompt in each mode, one after the other, and check that the text is the same."""
        from workbench.spec.generate import generate

        o, model = self.options, self.model
        exact = model.exact
        plainly = {"plain, exact": True, "plain, fast": False} if exact else {"plain, fast": False}
        name = f"speculative k={o.k}, {'exact' if exact else 'fast'}"
        runs: dict[str, list[Generation]] = {mode: [] for mode in [*plainly, name]}
        prompts = self._prompts()
        options: dict[str, Any] = {"max_new_tokens": o.max_new_tokens, "ignore_eos": True}
        for k in (0, o.k):  # the first calls of a process are slower
            generate(model, prompts[0], k=k, **{**options, "max_new_tokens": 2})
        with progress(len(prompts) * len(runs), desc="decode", unit="text") as bar:
            for prompt in prompts:
                for mode, kind in plainly.items():
                    runs[mode].append(generate(model, prompt, k=0, exact=kind, **options))
                    bar.update()
                runs[name].append(generate(model, prompt, k=o.k, **options))
                bar.update()
        self.live = runs[name]
        reference = runs[next(iter(plainly))]
        self.same = sum(a.tokens == b.tokens for a, b in zip(self.live, reference, strict=True))
        assert self.same == len(prompts) or not exact, "speculative output left plain output in exact mode"
        for mode, made in runs.items():
            self.speeds[mode] = sum(len(g.tokens) - 1 for g in made) / sum(g.setup.rounds for g in made)
        self.anatomy = generate(model, prompts[0], k=o.k, anatomy=True, **options)
        self.own = self._own_tapes()
        from workbench.corpus.save import save_tapes

        save_tapes(self.own, self.out / "own.jsonl")
        self.rounds.write_parquet(self.out / "rounds.parquet")

    def extract(self) -> None:
        """Write anchor records of the documents."""
        from workbench.corpus import corpus
        from workbench.datasets import extract

        o, model = self.options, self.model
        self.tapes = corpus("demo", tokenizer=model.tokenizer, limit=o.documents, max_tokens=o.max_tokens,
                            overflow="truncate", min_tokens=o.gamma + 2, seed=o.seed)  # fmt: skip
        top_k = min(64, model.config.vocab_size)
        records = extract(model, self.tapes, out=self.out / "anchors", gamma=o.gamma, top_k=top_k, seed=o.seed)
        self.records = len(records)

    def replay(self) -> None:
        """Write the draft tables, and compare the walk over the target's own texts with the live rounds."""
        from workbench.replay import compare_rounds, replay

        o, model = self.options, self.model
        self.table = replay(model, self.tapes, out=self.out / "table", k_max=o.k_max)
        self.own_table = replay(model, self.own, out=self.out / "own-table", k_max=o.k_max)
        walked = self.own_table.rounds(k=o.k, estimator="own")
        parted = compare_rounds(walked, self.rounds)
        assert not len(parted) or not model.exact, f"the walk left the live rounds in exact mode: {parted.row(0)}"
        self.agreed = (len(self.rounds) - len(parted), len(self.rounds))
        self.table.nll.write_parquet(self.out / "nll.parquet")

    def sweep(self) -> None:
        """Walk a grid of draft lengths and p_min over the table."""
        import polars as pl

        points = [(k, p_min) for k in range(1, self.options.k_max + 1) for p_min in P_MIN]
        rows = []
        for k, p_min in progress(points, desc="sweep", unit="policy"):
            found = acceptance(self.table.rounds(k=k, p_min=p_min, estimator="forced"))
            keep = ("rounds", "drafted", "accepted", "emitted", "tau", "efficiency", "emitted_per_round")
            rows.append({"k": k, "p_min": p_min, **{name: getattr(found, name) for name in keep}})
        self.grid = pl.DataFrame(rows, infer_schema_length=None)
        self.grid.write_parquet(self.out / "sweep.parquet")

    def finish(self) -> None:
        """Write the manifest, and beside it what depends on the clock."""
        from workbench.corpus.fingerprint import corpus_fingerprint
        from workbench.datasets.provenance import new_manifest

        prompts = {"fingerprint": corpus_fingerprint(self.own), "tapes": len(self.own), "tokens": self.own.n_tokens}
        extra = {"command": self.command(), "own_tapes": prompts, "sweep_p_min": list(P_MIN)}
        self.manifest = new_manifest("demo", self.model, self.tapes, parameters=asdict(self.options), extra=extra)
        state = git_state()
        self.manifest.git = [] if state is None else [state]
        live = acceptance(self.rounds)
        self.manifest.counts = {"prompts": len(self.live), "live_rounds": live.rounds, "drafted": live.drafted,
                                "accepted": live.accepted, "records": self.records, "documents": len(self.tapes),
                                "table_rows": len(self.table.frame)}  # fmt: skip
        self.manifest.files = {name: sha256_file(self.out / name) for name in HASHED}
        self.manifest.complete = True
        self.manifest.write(self.out)
        write_json(self.out / "timings.json", plain({"speeds": self.speeds, "phases": self.phases.to_dicts()}))

    @property
    def rounds(self) -> pl.DataFrame:
        """The live speculative rounds of every prompt."""
        import polars as pl

        return pl.concat([g.rounds for g in self.live])

    @property
    def phases(self) -> pl.DataFrame:
        """Where the time of the live speculative runs went."""
        steps = self.anatomy.draft_steps
        return phases_frame(self.rounds, draft_steps=() if steps is None else steps, setup=[g.setup for g in self.live])

    @property
    def speedups(self) -> dict[str, float]:
        """Speculative speed over that of each plain mode."""
        *plainly, name = self.speeds
        return {mode: self.speeds[name] / self.speeds[mode] for mode in plainly}

    def command(self) -> str:
        """The command line that repeats this run."""
        given = {**asdict(self.options), "threads": self._threads()}
        numerics = (
            f"--dtype {str(self.model.dtype).removeprefix('torch.')} {'--exact' if self.model.exact else '--fast'}"
        )
        words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
        return f"workbench demo --model {Path(self.model.source).name} {numerics} {words}"

    def facts(self) -> dict[str, Any]:
        """The headline numbers."""
        live = acceptance(self.rounds)
        return {
            "exact": self.model.exact,
            "speeds": self.speeds,
            "speedups": self.speedups,
            "same_text": [self.same, len(self.live)],
            "live": {name: getattr(live, name) for name in ("rounds", "drafted", "accepted", "tau", "joint")},
            "repeated_8grams": self.repeated(),
            "records": self.records,
            "rows": len(self.table.frame),
            "walk_equals_live": list(self.agreed),
            "sweep": self.grid.to_dicts(),
        }

    def repeated(self) -> float:
        """Mean share of 8-grams that repeat, over the generated texts."""
        shares = [g.summary["repeated_8grams"] or 0.0 for g in self.live]
        return sum(shares) / len(shares)

    def lines(self) -> list[str]:
        """The headline numbers, for a terminal."""
        live, name = acceptance(self.rounds), list(self.speeds)[-1]
        ratios = ", ".join(f"{ratio:.2f}x {mode}" for mode, ratio in self.speedups.items())
        best = self.grid.sort("tau", descending=True).row(0, named=True)
        return [
            f"decode   {name}: {self.speeds[name]:.0f} tokens/s, {ratios}; same text for {self.same} of "
            f"{len(self.live)} prompts",
            f"         {live.accepted} of {live.drafted} drafts accepted, {live.tau or 0:.2f} a round without bonus; "
            f"{100 * self.repeated():.0f} % of the 8-grams repeat (a loop is easy to draft)",
            f"anchors  {self.records} records of {len(self.tapes)} documents",
            f"replay   {len(self.table.frame):,} positions, {self.options.k_max} slots each; on the target's own texts "
            f"the walk equals the live run in {self.agreed[0]} of {self.agreed[1]} rounds",
            f"sweep    {len(self.grid)} policies over that one recording: up to {best['tau']:.2f} accepted a round "
            f"(k={best['k']}, p_min={best['p_min']:g})",
        ]

    def _threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def _prompts(self) -> list[Tape]:
        """Shipped prompts, whole, register by register in turn."""
        from workbench.corpus import corpus
        from workbench.corpus.sources import DEMO

        file = DEMO.parent / "prompts" / "demo.jsonl"
        room = self.model.config.max_position_embeddings - self.options.max_new_tokens
        if room < 1:
            raise UserError(
                f"max_new_tokens={self.options.max_new_tokens} leaves no room for a prompt: this model's context is "
                f"{self.model.config.max_position_embeddings} tokens"
            )
        found = corpus(file, tokenizer=self.model.tokenizer, limit=self.options.prompts, max_tokens=room,
                       overflow="truncate", seed=self.options.seed)  # fmt: skip
        return [Tape(t.doc_id, t.tokens, len(t), t.source) for t in found]

    def _own_tapes(self) -> Corpus:
        """Prompt and text of every live run as tapes that the target wrote itself."""
        from workbench.model.fingerprint import fingerprint

        assert self.model.tokenizer is not None
        own = Own("greedy", fingerprint(self.model))
        tapes = [
            Tape(g.doc_id, [*g.prompt, *g.tokens], len(g.prompt), g.source, own=own)  # type: ignore[arg-type]
            for g in self.live
        ]
        return Corpus(tapes, name="own(demo prompts)", tokenizer=self.model.tokenizer.fingerprint)
