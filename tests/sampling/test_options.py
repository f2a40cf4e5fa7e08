"""Shapings: every invalid setting is a sentence that names it; keys are JSON and the same for equal shapings."""

from __future__ import annotations

import json
from math import inf, nan

import pytest

from workbench.core.errors import UserError
from workbench.sampling.options import Shaping, seed_window

INVALID = [
    ("temperature", -0.1), ("temperature", inf), ("temperature", nan), ("temperature", "hot"), ("temperature", True),
    ("top_k", -1), ("top_k", 2.5), ("top_k", True),
    ("top_p", 0.0), ("top_p", 1.01), ("top_p", nan), ("top_p", -1),
    ("min_p", 1.0), ("min_p", -0.01), ("min_p", nan),
    ("repetition_penalty", 0.0), ("repetition_penalty", -1), ("repetition_penalty", inf),
    ("frequency_penalty", 2.1), ("frequency_penalty", -2.1), ("frequency_penalty", nan),
    ("presence_penalty", 2.1), ("presence_penalty", -2.1),
    ("penalty_last_n", 0), ("penalty_last_n", -1), ("penalty_last_n", 1.5),
    ("logit_bias", {1: nan}), ("logit_bias", {1: inf}), ("logit_bias", {-1: 0.0}), ("logit_bias", {"a": 0.0}),
    ("logit_bias", [(1, 0.0), (1, 1.0)]), ("logit_bias", [1, 2]), ("logit_bias", 3), ("logit_bias", {1: "x"}),
    ("order", "reverse"), ("order", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), INVALID, ids=repr)
def test_an_invalid_setting_is_a_sentence_that_names_it(name, value):
    with pytest.raises(UserError, match=name) as caught:
        Shaping(temperature=0.7, order="chain", **{name: value}) if name not in ("temperature", "order") else Shaping(
            **{name: value}
        )
    assert len(str(caught.value)) > 40 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        dict(temperature=0), dict(temperature=5e-324), dict(temperature=1e300), dict(top_p=1), dict(top_p=5e-324),
        dict(min_p=0), dict(min_p=1 - 2**-53), dict(frequency_penalty=2), dict(presence_penalty=-2),
        dict(penalty_last_n=1), dict(repetition_penalty=1e-6), dict(logit_bias={0: -inf}), dict(top_k=10**9),
    ],
    ids=repr,
)  # fmt: skip
def test_bounds_are_valid(fields):
    assert Shaping(**fields) == Shaping(**fields)


def test_a_bias_is_stored_in_the_order_of_ids_however_given():
    a, b = Shaping(logit_bias={5: 1, 2: -inf}), Shaping(logit_bias=[(2, -inf), (5, 1.0)])
    assert a == b and hash(a) == hash(b) and a.bias == ((2, -inf), (5, 1.0)) and a.key() == b.key()


def test_a_key_is_strict_json_and_tells_shapings_apart():
    a = Shaping(temperature=0.7, top_p=0.9, logit_bias={5: 1, 2: -inf})
    assert json.loads(json.dumps(a.key(), allow_nan=False)) == a.key()
    given = {**a.key(), "logit_bias": [(i, float(v)) for i, v in a.key()["logit_bias"]]}
    assert Shaping(**given) == a
    assert Shaping(temperature=0.7).key() != Shaping(temperature=0.7, order="joint").key()


def test_what_a_shaping_says_of_itself():
    assert Shaping().greedy and not Shaping(temperature=0.1).greedy
    assert not Shaping(penalty_last_n=5, logit_bias={1: 2}).penalised
    for name, value in (("repetition_penalty", 1.1), ("frequency_penalty", 0.1), ("presence_penalty", -0.1)):
        assert Shaping(**{name: value}).penalised
    with pytest.raises(TypeError):
        Shaping(0.7)  # type: ignore[misc]


def test_the_window_of_the_seed():
    assert [seed_window(n) for n in (1, 64, 65, 8192, 10**6)] == [64, 64, 65, 8192, 8192]
    with pytest.raises(UserError, match="penalty_last_n"):
        seed_window(0)
