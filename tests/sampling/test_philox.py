"""Philox is the standard one; its numbers belong to an id, a position and a purpose, whatever is asked for beside."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.core.errors import UserError
from workbench.sampling import philox as module
from workbench.sampling.philox import ACCEPT, DRAFT, RESIDUAL, TARGET, Noise, philox, uniform

ROOT = Path(__file__).resolve().parents[2]
ONES = 0xFFFFFFFF
KNOWN = [  # Random123's kat_vectors for philox4x32-10
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def reference(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """One block by arbitrary-precision integers, as the paper writes it."""
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for i in range(10):
        high_a, low_a = divmod(0xD2511F53 * x0, 2**32)
        high_b, low_b = divmod(0xCD9E8D57 * x2, 2**32)
        a, b = (k0 + i * 0x9E3779B9) % 2**32, (k1 + i * 0xBB67AE85) % 2**32
        x0, x1, x2, x3 = high_b ^ x1 ^ a, low_b, high_a ^ x3 ^ b, low_a
    return x0, x1, x2, x3


def random_blocks(count: int) -> tuple[list[tuple[int, ...]], tuple[int, int]]:
    draw = random.Random(count)
    edge = (0, 1, ONES, ONES - 1, 1 << 31)
    word = lambda: draw.choice(edge) if draw.random() < 0.3 else draw.getrandbits(32)  # noqa: E731
    return [tuple(word() for _ in range(4)) for _ in range(count)], (word(), word())


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    assert philox(counter, key) == expected == reference(counter, key)
    arrays = philox([np.full(1, word) for word in counter], key)
    tensors = philox([torch.tensor([word]) for word in counter], key)
    assert tuple(int(w[0]) for w in arrays) == tuple(int(w[0]) for w in tensors) == expected


def test_arrays_and_tensors_equal_the_integer_reference():
    blocks, key = random_blocks(300)
    expected = np.array([reference(block, key) for block in blocks]).T
    columns = np.array(blocks).T.copy()
    assert np.array_equal(np.stack(philox(columns, key)), expected)
    assert np.array_equal(torch.stack(philox(torch.from_numpy(columns), key)).numpy(), expected)


TRITON = """
import json, sys, torch, triton, triton.language as tl
@triton.jit
def kernel(seed, c, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x0, x1, x2, x3 = tl.philox(seed, tl.load(c + i).to(tl.uint32), tl.load(c + N + i).to(tl.uint32),
                               tl.load(c + 2 * N + i).to(tl.uint32), tl.load(c + 3 * N + i).to(tl.uint32))
    tl.store(out + i, x0.to(tl.int64)); tl.store(out + N + i, x1.to(tl.int64))
    tl.store(out + 2 * N + i, x2.to(tl.int64)); tl.store(out + 3 * N + i, x3.to(tl.int64))
blocks, key = json.loads(sys.stdin.read())
c = torch.tensor(blocks).t().contiguous()
out = torch.zeros_like(c)
seed = key[0] | key[1] << 32
kernel[(1,)](seed - 2**64 if seed >= 2**63 else seed, c, out, N=c.shape[1])
print(json.dumps(out.t().tolist()))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed here")
def test_bit_equal_to_four_word_philox_of_triton(tmp_path):
    blocks, key = random_blocks(64)
    script = tmp_path / "four_words.py"
    script.write_text(TRITON, "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps([blocks, key]),
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    expected = philox(np.array(blocks).T.copy(), key)
    assert json.loads(done.stdout) == np.stack(expected, 1).tolist()


def test_uniforms_lie_strictly_inside_the_unit_interval():
    for kind in (int, np.int64, torch.tensor):
        low, high = float(uniform(kind(0))), float(uniform(kind(ONES)))
        assert 0 < low == 2.0**-33 and high == 1 - 2.0**-33 < 1
    extremes = -np.log(-np.log(uniform(np.array([0, ONES]))))
    assert np.isfinite(extremes).all()


def test_streams_repeat_and_differ_in_every_part_of_their_name():
    ids = torch.arange(40)
    base = Noise(7).gumbel(ids, 5, DRAFT, 3)
    assert torch.equal(base, Noise(7, 0).gumbel(ids, 5, DRAFT, 3))
    others = [
        Noise(8).gumbel(ids, 5, DRAFT, 3),
        Noise(7, 1).gumbel(ids, 5, DRAFT, 3),
        Noise(7).gumbel(ids, 6, DRAFT, 3),
        Noise(7).gumbel(ids, 5, RESIDUAL, 3),
        Noise(7).gumbel(ids, 5, DRAFT, 4),
        Noise(7).gumbel(ids, 5, TARGET),
    ]
    for other in others:
        assert not (base == other).any()
    values = {Noise(7).uniform(5, purpose, 3) for purpose in (TARGET, DRAFT, ACCEPT, RESIDUAL)}
    values |= {
        Noise(7).uniform(5, ACCEPT, 4),
        Noise(7).uniform(6, ACCEPT, 3),
        Noise(7).uniform(5, ACCEPT, 3, tag=1 << 30),
    }
    assert len(values) == 7 and Noise(7).uniform(5, ACCEPT, 3) in values


def test_seed_and_sequence_never_run_together():
    assert len({Noise(a, b).key for a in range(30) for b in range(30)}) == 900
    assert Noise(1, 23).key != Noise(12, 3).key


def test_the_target_does_not_depend_on_the_round():
    noise, ids = Noise(3), torch.arange(9)
    assert torch.equal(noise.gumbel(ids, 4, TARGET, 0), noise.gumbel(ids, 4, TARGET, 99))
    assert noise.uniform(4, TARGET, 0) == noise.uniform(4, TARGET, 99)


def test_counter_words_and_lanes_are_those_documented():
    noise = Noise(11, 2)
    for i in (0, 1, 2, 3, 4, 1001, 248_319):
        word = reference((i // 4, 17, DRAFT, 13), noise.key)[i % 4]
        expected = -np.log(-np.log((np.array([word]) + 0.5) / 2**32))[0]
        assert float(noise.gumbel(torch.tensor([i]), 17, DRAFT, 13)[0]) == expected
    word = reference((ONES, 17, ACCEPT, 13), noise.key)[0]
    assert noise.uniform(17, ACCEPT, 13) == (word + 0.5) / 2**32


def test_many_positions_equal_one_by_one():
    noise, positions = Noise(5, 1), [0, 1, 7, 2**32 - 1]
    rows = noise.gumbel_rows(83, positions)
    assert rows.shape == (4, 83) and rows.dtype == torch.float64
    for row, position in zip(rows, positions):
        assert torch.equal(row, noise.gumbel(torch.arange(83), position))
    assert noise.gumbel_rows(83, []).shape == (0, 83)


def test_a_subset_equals_the_slice_of_the_whole_row_bit_for_bit():
    noise, vocab = Noise(9), 50_001
    whole = noise.gumbel_rows(vocab, [12], DRAFT, 4)[0]
    draw = np.random.default_rng(0)
    for size in [*range(1, 20), 33, 64, 65, 1000, 20_000]:
        ids = torch.from_numpy(draw.choice(vocab, size, replace=False))
        assert torch.equal(noise.gumbel(ids, 12, DRAFT, 4), whole[ids])
        ids = ids.sort().values
        assert torch.equal(noise.gumbel(ids, 12, DRAFT, 4), whole[ids])


def test_the_route_of_other_devices_gives_the_same_noise():
    noise, ids = Noise(9), torch.tensor([0, 3, 4, 77, 5, 1000])
    counters = [(12, DRAFT, 4), (13, TARGET, 0)]
    found = module._rows_on_device(ids, counters, noise.key)
    expected = torch.stack([noise.gumbel(ids, 12, DRAFT, 4), noise.gumbel(ids, 13)])
    assert torch.allclose(found, expected, rtol=1e-13, atol=1e-13)


def test_gumbel_noise_has_its_law():
    noise = torch.stack([Noise(s).gumbel_rows(1000, range(10)) for s in range(5)]).flatten()
    below = torch.exp(-torch.exp(-noise)).sort().values  # uniform, if the law is right
    distance = (below - (torch.arange(len(below)) + 0.5) / len(below)).abs().max()
    assert distance < 1.95 / len(below) ** 0.5  # Kolmogorov-Smirnov at 0.1 %


@pytest.mark.parametrize(
    "call",
    [
        lambda: Noise(-1),
        lambda: Noise(True),
        lambda: Noise(0, -1),
        lambda: Noise(0, 1.5),
        lambda: Noise(0).uniform(-1, ACCEPT),
        lambda: Noise(0).uniform(2**32, ACCEPT),
        lambda: Noise(0).uniform(0, 4),
        lambda: Noise(0).uniform(0, ACCEPT, -1),
        lambda: Noise(0).uniform(0, ACCEPT, tag=5),
        lambda: Noise(0).gumbel(torch.tensor([1]), -1),
    ],
)
def test_words_out_of_range_are_sentences(call):
    with pytest.raises(UserError, match="is not valid"):
        call()
