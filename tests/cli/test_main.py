"""The command as a process and as a function: help, verbs, exit codes, streams."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from workbench.cli import main as command
from workbench.cli.parser import spoken

JOBS = [
    "demo",
    "generate",
    "extract",
    "replay",
    "export",
    "bench",
    "info",
    "train demo-corpus",
    "train demo",
    "train average",
]
EVERYWHERE = ("--json", "--out", "--seed", "--device", "--threads", "--quiet")


def process(code: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, **options)


def test_the_help_is_light():
    code = (
        "import sys; from workbench.cli.main import main; assert main(['--help']) == 0;"
        "print(sorted({'torch', 'polars', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        done = process(code)
        seconds.append(time.perf_counter() - began)
        assert done.returncode == 0 and done.stdout.strip().endswith("[]"), done
    assert min(seconds) < 1.0
    assert all(verb in done.stdout for verb in command.VERBS)


@pytest.mark.parametrize("job", JOBS)
def test_every_verb_explains_its_options(run, job):
    ran = run(*job.split(), "--help")
    assert ran.code == 0 and ran.err == ""
    assert ran.out.startswith(f"usage: workbench {job}")
    assert all(option in ran.out for option in EVERYWHERE)
    assert "%(" not in ran.out and "SUPPRESS" not in ran.out


def test_train_lists_its_jobs_and_the_version_is_printed(run):
    assert "average" in run("train", "--help").out
    assert run("--version").out.startswith("workbench 0.")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "a verb is needed: choose one of demo, generate"),
        (("genrate",), "did you mean 'generate'?"),
        (("generate", "x", "--max-token", "3"), "unknown option --max-token: did you mean --max-new-tokens?"),
        (("generate", "x", "--max-new"), "unknown option --max-new"),  # no abbreviations
        (("generate", "x", "--zzz"), "unknown option --zzz: valid: --help, --file"),
        (("generate", "two", "words"), "unexpected argument 'words': quote a text of several words"),
        (("generate", "x", "--k"), "--k needs a value"),
        (("generate", "x", "--exact", "--fast"), "--fast and --exact exclude each other"),
        (("generate", "x", "--k", "three"), "--k 'three' is not valid: it must be an integer"),
        (("generate", "x", "--floor", "many"), "--floor 'many' is not valid: it must be an integer, or none"),
        (("generate", "x", "--device", "tpu"), "--device 'tpu' is not valid: choose one of 'cpu', 'cuda'"),
        (("extract",), "--out is needed"),
        (("train",), "a job is needed: choose one of demo-corpus, demo, average"),
        (("train", "demos"), "did you mean 'demo'?"),
        (("train", "demo"), "--corpus, --out are needed"),
    ],
)
def test_what_is_not_understood_is_a_sentence(argv, says, capsys):
    assert command.main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1


def test_the_process_exits_with_2_and_no_traceback():
    done = subprocess.run(
        [sys.executable, "-m", "workbench.cli.main", "extract", "--out", "never-made", "--gamma", "0"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr == "workbench: --gamma 0 is not valid: it must be an integer of at least 1; a record needs a slot\n"
    )


def test_a_reader_that_goes_away_is_no_fault():
    code = "from workbench.cli.main import main; import sys; sys.exit(main(['--help']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as one:
        assert one.stdout is not None and one.stderr is not None
        one.stdout.close()
        assert b"Traceback" not in one.stderr.read()


def replace_verb(monkeypatch, name: str, run) -> None:
    """Put a verb in place of a real one."""
    args = SimpleNamespace(seed=None, quiet=True, json=False, threads=None)
    module = SimpleNamespace(read=lambda argv: args, run=run, GO_ON="the rest is yours")
    monkeypatch.setitem(sys.modules, f"workbench.cli.{name}", module)


def test_an_interrupt_is_130_and_says_how_to_go_on(monkeypatch, run):
    def interrupted(args):
        raise KeyboardInterrupt

    replace_verb(monkeypatch, "info", interrupted)
    ran = run("info")
    assert ran.code == 130 and ran.err.strip() == "workbench info: interrupted; the rest is yours"


def test_a_full_disk_is_a_sentence(monkeypatch, run):
    def full(args):
        raise OSError(28, "No space left on device", "somewhere")

    replace_verb(monkeypatch, "info", full)
    ran = run("info")
    assert ran.code == 2 and ran.err.startswith("workbench: somewhere: No space left on device")


def test_a_fault_of_the_workbench_keeps_its_traceback(monkeypatch, run):
    def broken(args):
        raise AssertionError("an invariant")

    replace_verb(monkeypatch, "info", broken)
    with pytest.raises(AssertionError, match="an invariant"):
        run("info")


def test_what_a_verb_prints_stays_off_stdout(monkeypatch, run):
    from workbench.cli.common import Outcome

    def chatty(args):
        print("a line of a library")
        return Outcome({"a": float("nan"), "b": (1, 2)}, "text")

    replace_verb(monkeypatch, "info", chatty)
    ran = run("info")
    assert ran.out == "text\n" and "a line of a library" in ran.err


@pytest.mark.parametrize(
    ("said", "spoke"),
    [
        ("k=-1 is not valid", "--k -1 is not valid"),
        ("floor=2 needs adaptive=True", "--floor 2 needs --adaptive"),
        ("carry=False and floor=None", "--no-carry and --floor none"),
        ("top_k='x' is above 4", "--top-k x is above 4"),
        ("cut them with corpus(..., top_k=7)", "cut them with --top-k 7"),
        ("use top_k of at most 4", "use --top-k of at most 4"),
        ("floor=[5, 3] is not valid", "--floor 5,3 is not valid"),
        ("there is no 'top_k' in a/top_k.txt", "there is no 'top_k' in a/top_k.txt"),
        ("prompt_k=3 stays", "prompt_k=3 stays"),
    ],
)
def test_sentences_speak_of_options(said, spoke):
    assert spoken(said, ["k", "floor", "adaptive", "carry", "top_k"]) == spoke


def test_without_options_a_sentence_stays():
    assert spoken("k=-1 is not valid", []) == "k=-1 is not valid"
