"""``workbench generate`` under sampling: seeds, rules, streams, stops and grammars."""

from __future__ import annotations

import json

import pytest

ASK = ("generate", "The President said", "--max-new-tokens", "12", "--quiet")
WARM = ("--temperature", "0.9", "--top-p", "0.9")


def test_a_seed_names_a_text_and_drafting_does_not_change_it(run):
    def ids(*more: str) -> list[int]:
        return run(*ASK, *WARM, "--json", *more).data["token_ids"]

    one = ids("--seed", "1")
    assert one == ids("--seed", "1", "--k", "0") == ids("--seed", "1", "--k", "5", "--p-min", "0.4")
    assert one != ids("--seed", "2") and one != ids("--seed", "1", "--sequence", "1")
    assert len(ids("--seed", "1", "--accept", "ratio")) == 12


def test_a_stream_shows_the_same_text(run):
    whole, streamed = run(*ASK, *WARM, "--seed", "3"), run(*ASK, *WARM, "--seed", "3", "--stream")
    assert streamed.code == 0 and streamed.out == whole.out
    assert "12 tokens after" in streamed.err


def test_a_stop_string_cuts_the_text(run):
    text = run(*ASK, "--json").data["text"]
    stop = text[5:8]
    made = run(*ASK, "--json", "--stop", stop).data
    assert made["text"] == text[: text.index(stop)] and made["summary"]["finish"] == "stop_string"


def test_grammars(run, tmp_path):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    ask = ("generate", "JSON: ", "--max-new-tokens", "40", "--quiet", "--json")
    picked = run(*ask, "--choice", "yes", "--choice", "no").data
    assert picked["text"] in ("yes", "no") and picked["summary"]["finish"] == "stop"
    number = run(*ask, "--regex", "[0-9]{3}", *WARM).data["text"]
    assert len(number) == 3 and number.isdigit()
    made = run(*ask, "--json-schema", file).data
    assert made["summary"]["finish"] != "stop" or 0 <= json.loads(made["text"])["n"] <= 9


@pytest.mark.parametrize(
    "argv, says",
    [
        (("--temperature", "-1"), "temperature"),
        (("--top-p", "0"), "--top-p 0"),
        (("--min-p", "1"), "--min-p 1"),
        (("--filter-order", "sideways"), "'chain', 'joint', 'temperature_last'"),
        (("--accept", "maybe"), "'coupled', 'ratio'"),
        (("--accept", "ratio", "--temperature", "1", "--p-min", "0.5"), "--p-min-reads top"),
        (("--logit-bias", "twelve"), "12:-1.5,13:2"),
        (("--stop-token-ids", "a"), "12,13"),
        (("--stream", "--json"), "--stream goes neither with"),
        (("--regex", "a", "--choice", "b"), "exclude each other"),
        (("--regex", "("), "regex"),
        (("--choice", "a", "--grammar-engine", "guess"), "llguidance"),
    ],
)
def test_bad_requests_are_sentences(refused, argv, says):
    assert says.lower() in refused("generate", "Dear", *argv).lower()
