"""``workbench generate``: text on stdout, the summary on stderr, files whole or absent."""

from __future__ import annotations

import json

import pytest

SHORT = ("--max-new-tokens", "6", "--threads", "1")


def test_the_text_goes_to_stdout_and_the_summary_to_stderr(run):
    plain = run("generate", "def main(", *SHORT, "--k", "0")
    drafted = run("generate", "def main(", *SHORT)
    assert plain.code == drafted.code == 0
    assert plain.out == drafted.out != ""
    assert "6 tokens after" in plain.err and "exact numerics" in plain.err
    assert "drafts accepted" in drafted.err and "drafts accepted" not in plain.err


def test_json_is_one_object(run):
    ran = run("generate", "The President", *SHORT, "--json", "--fast", "--seed", "3", "--device", "cpu")
    data = ran.data
    assert ran.out.count("\n") == 1
    assert data["verb"] == "generate" and len(data["token_ids"]) == data["summary"]["tokens"] == 6
    assert data["summary"]["exact"] is False


def test_cache_formats_and_a_window_are_options(run, refused):
    ask = ("generate", "def main(", *SHORT, "--json", "--k-format", "q8_0", "--v-format", "q5_1", "--window", "4")
    assert run(*ask).data["token_ids"] == run(*ask, "--k", "0").data["token_ids"]
    says = refused("generate", "x", "--k-format", "q4")
    assert "q8_0" in says and "q5_1" in says


def test_prompts_come_from_a_file_or_stdin_as_they_are(run, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("def main(", "utf-8")
    argument = run("generate", "def main(", *SHORT, "--json").data["token_ids"]
    assert run("generate", "--file", file, *SHORT, "--json").data["token_ids"] == argument
    assert run("generate", *SHORT, "--json", stdin="def main(").data["token_ids"] == argument
    assert run("generate", "-", *SHORT, "--json", stdin="def main(").data["token_ids"] == argument


def test_a_given_text_is_committed(run, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("self, name):\n    pass\n", "utf-8")
    after = run("generate", "def main(", "--force", file, "--json").data
    assert after["text"] == "self, name):\n    pass\n" and after["summary"]["finish"] == "forced"
    alone = run("generate", "--force", file, "--json").data
    assert alone["summary"]["prompt_tokens"] == 1
    short = run("generate", "def main(", "--force", file, "--max-new-tokens", "2", "--json").data
    assert short["token_ids"] == after["token_ids"][:2]


def test_files_are_written_whole(run, tmp_path):
    import polars as pl

    out, html = tmp_path / "deep" / "made", tmp_path / "strip.html"
    ran = run("generate", "def main(", *SHORT, "--out", out, "--html", html, "--json")
    assert ran.data["written"] == [str(out), str(html)]
    assert sorted(path.name for path in out.iterdir()) == ["generation.json", "rounds.parquet", "strip.html"]
    kept = json.loads((out / "generation.json").read_text("utf-8"))
    assert kept["text"] == ran.data["text"] and len(kept["rounds"]) == len(pl.read_parquet(out / "rounds.parquet"))
    assert "accepted draft" in html.read_text("utf-8") and "http" not in html.read_text("utf-8")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("",), "the prompt is empty"),
        ((), "the prompt is empty"),
        (("x", "--k", "-1"), "--k -1 is not valid: it must be an integer from 0 to 64"),
        (("x", "--max-new-tokens", "0"), "--max-new-tokens 0 is not valid"),
        (("x", "--max-new-tokens", "-5"), "--max-new-tokens -5 is not valid"),
        (("x", "--p-min", "nan"), "--p-min nan is not valid"),
        (("x", "--p-min", "1.5"), "--p-min 1.5 is not valid"),
        (("x", "--chunk", "0"), "--chunk 0 is not valid"),
        (("x", "--carrier", "raw"), "--carrier 'raw' is not valid: choose one of 'normed', 'pre_norm'"),
        (("x", "--floor", "2"), "--floor 2 needs --adaptive"),
        (("x", "--cap", "2"), "--cap needs --adaptive"),
        (("x", "--adaptive", "--k", "0"), "--adaptive with --k 0 is not valid"),
        (("x", "--max-new-tokens", "9000"), "is over this model's context of 8192"),
        (("x", "--file", "y"), "PROMPT and --file exclude each other"),
        (("--file", "no-such-file"), "--file 'no-such-file' is not valid: there is no such file"),
        (("x", "--force", "no-such-file"), "--force 'no-such-file' is not valid"),
        (("x", "--html", "no/such/dir/a.html"), "lies in a directory that does not exist"),
        (("x", "--device", "cuda"), "torch sees no GPU here"),
        (("x", "--threads", "0"), "--threads 0 is not valid"),
        (("x", "--seed", "-1"), "--seed -1 is not valid"),
        (("x", "--model", "no-such-model"), "'no-such-model' is not a directory here"),
    ],
)
def test_bad_requests_are_sentences(refused, argv, says):
    if "cuda" in argv and __import__("torch").cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert says in refused("generate", *argv)


def test_nothing_is_decoded_into_a_place_that_is_taken(refused, tmp_path):
    (tmp_path / "kept").write_text("mine", "utf-8")
    assert "holds files already" in refused("generate", "x", "--out", tmp_path)
    assert "is a file already" in refused("generate", "x", "--out", tmp_path / "kept")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert "is not UTF-8 text" in refused("generate", "--file", tmp_path / "latin")
    assert "is a directory" in refused("generate", "x", "--html", tmp_path)


def test_a_checkpoint_without_tokenizer_or_head_says_so(refused, tiny_checkpoint):
    assert "has no tokenizer" in refused("generate", "x", "--model", tiny_checkpoint())
