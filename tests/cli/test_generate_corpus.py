"""``workbench generate-corpus``: what it writes, goes on with and refuses, and that ``--corpus`` reads it."""

from __future__ import annotations

import json

import pytest

SMALL = ("--prompts", "demo", "--limit", "2", "--prompt-tokens", "12", "--max-new-tokens", "8", "--threads", "1")
TALK = {"id": "c", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Left out"}]}


def test_it_answers_goes_on_and_is_a_corpus(run, tmp_path):
    out = tmp_path / "own"
    argv = ("generate-corpus", *SMALL, "--out", out, "--seed", "5", "--temperature", "0.8", "--k", "2")
    first = run(*argv, "--json")
    assert first.code == 0 and first.out.count("\n") == 1
    data = first.data
    assert data["answers"] == 2 and data["prompt_tokens"] == 24 and sum(data["finish"].values()) == 2
    assert data["parameters"]["seed"] == 5 and data["parameters"]["k"] == 2 and data["drafted"] > 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    again = run(*argv)
    assert again.code == 0 and again.out.startswith(
        f"2 answers in {tmp_path}/own, 16 tokens to prompts of 24: 1 shard, "
    )
    assert "workbench extract --corpus" in again.out and "ended: 2 by length" in again.out
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    read = run("extract", "--corpus", out, "--out", tmp_path / "anchors", "--gamma", "2", "--top-k", "4", "--json").data
    assert read["documents"] == 2 and read["tokens"] == 24 + 16 and read["records"] == 8


def test_chats_by_another_template_and_what_is_set_aside(run, refused, tmp_path):
    lines = tmp_path / "chats.jsonl"
    bad = {"id": "bad", "messages": [{"role": "system", "content": "Be kind."}]}
    lines.write_text(json.dumps(TALK) + "\n" + json.dumps(bad) + "\n", "utf-8")
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}{{ word }}", "utf-8")
    argv = ("generate-corpus", "--prompts", lines, "--out", tmp_path / "own", "--max-new-tokens", "4")
    argv = (*argv, "--chat-template", template, "--template-options", '{"word": "So:"}', "--no-turn-ends")
    assert "document 'bad': it asks nothing" in refused(*argv)
    made = run(*argv, "--skip-bad", "--json")
    assert made.data["answers"] == 1 and [one["doc_id"] for one in made.data["quarantined"]] == ["bad"]
    assert "1 prompt left out:" in made.err and "it asks nothing" in made.err
    from workbench import corpus, load

    (tape,) = corpus(tmp_path / "own")
    assert load("demo").tokenizer.decode(tape.tokens[: tape.prompt_len].tolist()) == "[Hi]So:"


def test_prompts_that_cannot_be_answered_are_set_aside_and_counted(run, refused, tmp_path):
    from workbench import load

    limit = load("demo").config.max_position_embeddings
    lines = tmp_path / "ids.jsonl"
    rows = [{"id": f"long{i}", "tokens": [65] * (limit + i)} for i in range(4)]
    rows += [{"id": "good", "tokens": [65, 66, 67]}, {"id": "none", "tokens": []}]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    argv = ("generate-corpus", "--prompts", lines, "--out", tmp_path / "own", "--max-new-tokens", "4")
    assert "document 'none': tokens must be a list of token ids" in refused(*argv)
    assert "holds no prompt that can be used; 6 in quarantine" in refused(*argv, "--skip-bad", "--max-prompt", "2")
    made = run(*argv, "--skip-bad", "--json")
    assert made.data["answers"] == 1 and len(made.data["quarantined"]) == 5
    assert {one["doc_id"] for one in made.data["quarantined"]} == {"none", "long0", "long1", "long2", "long3"}
    assert "5 prompts left out:" in made.err and "and 2 more, listed by --json" in made.err
    again = run(*argv, "--skip-bad", "--json")
    assert again.data["quarantined"] == made.data["quarantined"]


REFUSED = [
    (("--prompts", "no-such-file"), "source 'no-such-file' does not exist"),
    (("--max-new-tokens", "0"), "--max-new-tokens 0 is not valid"),
    (("--shard-rows", "0"), "--shard-rows 0 is not valid"),
    (("--prompt-tokens", "0"), "--prompt-tokens 0 is not valid"),
    (("--max-prompt", "1"), "over --max-prompt 1"),
    (("--template-options", "[1]"), "write a JSON object"),
    (("--chat", "--chat-template", "none.jinja"), "--chat-template none.jinja is not valid: there is no such file"),
    (("--graphs",), "run on a CUDA GPU"),
    (("--logprobs",), "--logprobs"),
]


@pytest.mark.parametrize(("argv", "says"), REFUSED)
def test_it_refuses_in_a_sentence_and_leaves_nothing(refused, tmp_path, argv, says):
    assert says in refused("generate-corpus", "--limit", "1", "--out", tmp_path / "out", *argv)
    assert not (tmp_path / "out").exists()


def test_the_help_names_every_default(run):
    helped = run("generate-corpus", "--help")
    told = " ".join(helped.out.split())
    assert helped.code == 0 and "(default: ())" not in told
    assert "Strings that end the text; it is cut before them. (default: none)" in told
    assert "or an option needs the host in every round" in told and "default: stop at the first" in told
    assert "--seed" in told and "--sequence" not in told and "--logprobs" not in told


def test_extract_takes_a_template(run, refused, tmp_path):
    lines = tmp_path / "chats.jsonl"
    lines.write_text(json.dumps(TALK) + "\n", "utf-8")
    argv = ("extract", "--corpus", lines, "--gamma", "2", "--top-k", "4")
    plain = run(*argv, "--out", tmp_path / "a", "--json").data
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}", "utf-8")
    other = run(*argv, "--out", tmp_path / "b", "--chat-template", template, "--json").data
    assert other["tokens"] < plain["tokens"]
    assert "there is no such file" in refused(*argv, "--out", tmp_path / "c", "--chat-template", "none.jinja")
