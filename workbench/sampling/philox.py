"""Noise that is a function of seed, sequence, position and purpose alone, so that batch order never matters.

Every number is one lane of Philox4x32-10. Counter words: (vocabulary id // 4, or a tag no id reaches; absolute
position; purpose; round start), lane id % 4; the key is a hash of (seed, sequence). Only the ids asked for are
evaluated. Legend: S ids, R positions.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; bit-equal to Random123 and to four-word
``tl.philox``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import UserError, check_int

TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)
TAG = 0xFFFFFFFF  # first counter word of a draw that belongs to no id; ids stay below 2**32, so id // 4 below 2**30

WORD = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
BUMPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
CHUNK = 8192  # four-word blocks evaluated together on a CPU: what its second-level cache holds

Words = Any  # an int, a numpy int64 array or a torch int64 tensor, each value in [0, 2**32)


def philox(counter: Sequence[Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """The four output words of Philox4x32-10.

    Args:
        counter: Four words that broadcast against each other: ints, numpy int64 arrays or torch int64 tensors.
        key: Two words.

    Returns:
        Four words of the kind and broadcast shape given. Products wrap modulo 2**64, which leaves both halves right.

    Source: Salmon et al. 2011, section 4.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((b >> 32) ^ (c1 ^ k0)) & WORD, b & WORD, ((a >> 32) ^ (c3 ^ k1)) & WORD, a & WORD
        k0, k1 = (k0 + BUMPS[0]) & WORD, (k1 + BUMPS[1]) & WORD
    return c0, c1, c2, c3


def uniform(words: Words) -> Any:
    """Words as float64 numbers strictly inside (0, 1): (v + 0.5) / 2**32."""
    return ((words.double() if isinstance(words, Tensor) else words) + 0.5) * 2.0**-32


def gumbel_of(u: np.ndarray) -> np.ndarray:
    """-log(-log u), with bits that do not depend on the numbers beside."""
    return -np.log(-np.log(u))


@dataclass(frozen=True)
class Noise:
    """Streams of noise of one sequence.

    Args:
        seed: At least 0; the same seed and sequence repeat the same noise.
        sequence: Which of the texts drawn under this seed; default 0.
        key: Philox key, made here: the first two little-endian words of sha256 of "seed sequence" in decimal.

    Raises:
        UserError: The seed or the sequence is not an integer of at least 0.
    """

    seed: int
    sequence: int = 0
    key: tuple[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", check_int("seed", self.seed, low=0))
        object.__setattr__(self, "sequence", check_int("sequence", self.sequence, low=0))
        digest = sha256(f"{self.seed} {self.sequence}".encode("ascii")).digest()
        words = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
        object.__setattr__(self, "key", words)

    def uniform(self, position: int, purpose: int, start: int = 0, tag: int = TAG) -> float:
        """One uniform number that belongs to no id.

        Args:
            position: Absolute position in the text.
            purpose: TARGET, DRAFT, ACCEPT or RESIDUAL.
            start: Absolute position at which the round began; TARGET does not depend on it.
            tag: First counter word, 2**30 or above.

        Returns:
            A number strictly inside (0, 1).

        Raises:
            UserError: A counter word is out of range.
        """
        check_int("tag", tag, low=1 << 30, high=WORD, hint="lower words belong to vocabulary ids")
        return float(uniform(philox((tag, *_words(position, purpose, start)), self.key)[0]))

    def uniforms(self, ids_S: Tensor, position: int, purpose: int = TARGET, start: int = 0) -> Tensor:
        """The uniform numbers whose -log(-log u) ``gumbel`` returns: float64 [S], CPU ids only."""
        counter = _words(position, purpose, start)
        return torch.from_numpy(_uniforms(_places(ids_S.numpy()), counter, self.key))

    def gumbel(self, ids_S: Tensor, position: int, purpose: int = TARGET, start: int = 0) -> Tensor:
        """Gumbel noise of the ids given, and of no others, at one position.

        Args:
            ids_S: Vocabulary ids, int64; ascending ids share work.
            position: Absolute position in the text.
            purpose: TARGET, DRAFT, ACCEPT or RESIDUAL; default TARGET.
            start: Absolute position at which the round began; TARGET does not depend on it.

        Returns:
            -log(-log u), float64 [S], on the device of the ids. On a CPU the bits of an id's noise do not depend on
            the ids beside it.

        Raises:
            UserError: A counter word is out of range.
        """
        return self.gumbel_rows(ids_S, [position], purpose, start)[0]

    def gumbel_rows(
        self, ids_S: Tensor | int, positions_R: Sequence[int], purpose: int = TARGET, start: int = 0
    ) -> Tensor:
        """Gumbel noise of the same ids at many positions.

        Args:
            ids_S: Vocabulary ids, int64; or the size of a vocabulary, for all of it, on the CPU.
            positions_R: Absolute positions.
            purpose: TARGET, DRAFT, ACCEPT or RESIDUAL; default TARGET.
            start: Absolute position at which the round began; TARGET does not depend on it.

        Returns:
            Float64 [R, S], row for row what ``gumbel`` returns.

        Raises:
            UserError: A counter word is out of range.
        """
        ids = torch.arange(ids_S) if isinstance(ids_S, int) else ids_S
        counters = [_words(int(position), purpose, start) for position in positions_R]
        if ids.device.type != "cpu":
            return _rows_on_device(ids, counters, self.key)
        out = np.empty((len(counters), len(ids)))
        places = _places(ids.numpy())
        for row, counter in zip(out, counters, strict=True):
            row[:] = gumbel_of(_uniforms(places, counter, self.key))
        return torch.from_numpy(out)


def _words(position: int, purpose: int, start: int) -> tuple[int, int, int]:
    """Counter words 1 to 3; the stream of TARGET is the same whatever the round."""
    if purpose not in (TARGET, DRAFT, ACCEPT, RESIDUAL):
        raise UserError(
            f"purpose={purpose!r} is not valid: choose TARGET (0), DRAFT (1), ACCEPT (2) or RESIDUAL (3) "
            "of workbench.sampling.philox"
        )
    check_int("position", position, low=0, high=WORD)
    check_int("start", start, low=0, high=WORD)
    return int(position), int(purpose), 0 if purpose == TARGET else int(start)


def _places(ids_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The four-word blocks that hold the ids, and the place of each id among the words of the blocks in turn."""
    block_S = ids_S >> 2
    low, high = (int(block_S.min()), int(block_S.max())) if len(ids_S) else (0, -1)
    if high - low < len(ids_S):  # dense: every block between
        return np.arange(low, high + 1), ids_S - 4 * low
    first_S = np.ones(len(ids_S), bool)  # sparse: one block for a run of neighbours
    np.not_equal(block_S[1:], block_S[:-1], out=first_S[1:])
    return block_S[first_S], 4 * (np.cumsum(first_S) - 1) + (ids_S & 3)


def _uniforms(places: tuple[np.ndarray, np.ndarray], counter: tuple[int, int, int], key: tuple[int, int]) -> np.ndarray:
    blocks, place_S = places
    numbers = np.empty((len(blocks), 4))
    for i in range(0, len(blocks), CHUNK):
        for lane, words in enumerate(philox((blocks[i : i + CHUNK], *counter), key)):
            numbers[i : i + CHUNK, lane] = uniform(words)
    return numbers.reshape(-1)[place_S]


def _rows_on_device(ids_S: Tensor, counters: Sequence[tuple[int, int, int]], key: tuple[int, int]) -> Tensor:
    """The same by torch operations, every id with a block of its own."""
    block_S, lane_S = ids_S >> 2, (ids_S & 3)[None]
    rows = []
    for counter in counters:
        words = torch.stack(philox((block_S, *counter), key)).gather(0, lane_S)[0]
        rows.append(-(-uniform(words).log()).log())
    return torch.stack(rows) if rows else torch.empty(0, len(ids_S), dtype=torch.float64, device=ids_S.device)
