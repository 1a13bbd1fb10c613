"""The command line: what it promises on good input, and one clear line, nothing lost, on bad input.

Most commands run in this process, through `main` and `sys.argv`; what depends on a real process (signals, pipes, full
disks, permissions) runs in one.
"""

import io
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from cases import refuses, rows
from invoking import Invoke, Outcome, assert_refused, contents, interrupted, process, start
from rich.table import Table
from rich.text import Text
from word_models import word_folder

from headwise import cli
from headwise.cli import app
from headwise.cli import run as run_module
from headwise.cli.app import call, in_options, print_json
from headwise.models.open import generate
from headwise.view import Progress, err, harmless, screen

TINY = ("--layers", "1", "--width", "8", "--heads", "2", "--context", "8", "--steps", "3")
TEXT = "the cat sat on the mat.\nel niño comió ñoquis.\n" * 7


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "cat.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A finished run, and what its training printed with --json."""
    folder = tmp_path_factory.mktemp("runs") / "cat"
    outcome = process("train", text, *TINY, "--out", folder, "--json")
    assert outcome.code == 0, outcome.err
    return folder, outcome


@pytest.fixture
def run(trained: tuple[Path, Outcome], tmp_path: Path) -> Iterator[Path]:
    """A copy of a finished run, whose files must be the same after the test."""
    folder = tmp_path / "cat"
    shutil.copytree(trained[0], folder)
    before = contents(folder)
    yield folder
    assert contents(folder) == before


def test_help_needs_neither_torch_nor_what_prices_models() -> None:
    check = "import sys, headwise.cli.run; sys.exit(bool({'torch', 'tokenizers', 'headwise.cost'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_a_missing_library_is_named_with_its_remedy(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['headwise', 'train']; import headwise.cli as c"
    child = subprocess.run([sys.executable, "-c", f"{code}; c.main()"], capture_output=True, text=True, cwd=tmp_path)
    assert_refused(Outcome(child.returncode, child.stdout, child.stderr), "torch", "pip install 'headwise[torch]'")
    assert list(tmp_path.iterdir()) == []

    def without_tokenizers() -> None:
        with app.needs_torch():
            raise ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers")

    refuses(without_tokenizers, r"tokenizers.*pip install 'headwise\[torch\]'")


def test_a_model_of_ours_needs_no_transformers(run: Path) -> None:
    code = """if True:
        import sys
        sys.modules["transformers"] = None
        import headwise as hw
        from headwise.cli import main
        hw.composition(hw.open(sys.argv[2]))
        main()"""
    given = [sys.executable, "-c", code, "why", str(run), "--prompt", "the", "--json"]
    child = subprocess.run(given, capture_output=True, text=True, check=False)
    assert (child.returncode, child.stderr) == (0, "") and json.loads(child.stdout)["heads"]


def test_a_model_of_others_is_refused_without_transformers_before_torch_loads(tmp_path: Path) -> None:
    folder = word_folder(tmp_path / "llama", "next")
    code = """if True:
        import sys
        sys.modules["transformers"] = sys.modules["torch"] = None
        from headwise.cli import main
        main()"""
    given = [sys.executable, "-c", code, "heads", str(folder), "--text", "a text that is long enough"]
    child = subprocess.run(given, capture_output=True, text=True, check=False)
    assert_refused(Outcome(child.returncode, child.stdout, child.stderr), "pip install 'headwise[hf]'")


def test_train_json_is_one_document_with_progress_elsewhere(trained: tuple[Path, Outcome]) -> None:
    folder, (_, out, err) = trained
    document = json.loads(out)
    assert document["run"] == str(folder) and Path(document["report"]).is_file()
    assert document["held_out_loss"] > 0 and document["baseline_loss"] > 0
    steps = re.findall(r"^step (\d/3)", err, re.MULTILINE)
    assert list(dict.fromkeys(steps)) == ["1/3", "2/3", "3/3"]  # a slow machine says one twice


def test_generate_prints_the_text_and_nothing_else_or_one_document(run: Path, invoke: Invoke) -> None:
    code, out, err = invoke("generate", run, "--prompt", "the ", "--tokens", 5, "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["prompt"] == "the " and document["n_tokens"] == 5
    assert document["text"].startswith("the ") and len(document["text"]) == 9
    document = json.loads(invoke("generate", run, "--prompt", "[b]the ", "--json").out or "{}")
    assert document == {}  # brackets were never seen
    assert "has not seen" in invoke("generate", run, "--prompt", "\udcff").err
    document = json.loads(invoke("generate", run, "--prompt", "the ", "--tokens", 30, "--json").out)
    assert invoke("generate", run, "--prompt", "the ", "--tokens", 30) == (0, document["text"] + "\n", "")
    assert invoke("generate", run, "--prompt", "the ", "--tokens", 0).out == "the \n"


def test_runs_without_a_name_never_write_over_one_another(
    text: Path, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke("train", text, *TINY).out.splitlines()[-1] == "report: runs/cat/report.html"
    before = contents(tmp_path / "runs/cat")
    assert invoke("train", text, *TINY).out.splitlines()[-1] == "report: runs/cat-2/report.html"
    assert contents(tmp_path / "runs/cat") == before


def test_markup_in_names_texts_and_prompts_is_text(invoke: Invoke, tmp_path: Path) -> None:
    script, run = "<script>alert(1)</script>", tmp_path / "<img src=x onerror=alert(3)>"
    path = tmp_path / f"{run.name}.txt"
    path.write_text(f"[bold red]x[/bold red] \\[y] :smile: {script}\n" * 9, encoding="utf-8")
    assert invoke("train", path, *TINY, "--context", 32, "--out", run).code == 0
    outcome = invoke("generate", run, "--prompt", "[bold red]:smile:", "--tokens", 1)
    assert outcome.out.startswith("[bold red]:smile:")
    for name in ("report.html", "walk.html"):
        (run / name).unlink()
    assert json.loads(invoke("heads", run, "--ablate", "none", "--json").out)["report"] is None
    assert not (run / "report.html").exists()  # who asks for JSON alone gets no page
    assert invoke("heads", run, "--ablate", "none").code == 0
    printed = invoke("heads", run, "--text", script, "--html", tmp_path / "page.html").out
    labels = re.findall(r"^ *(\S) ", printed, re.MULTILINE)
    assert "".join(labels[: len(script)]) == script and "\x1b" not in printed
    for page in (run / "report.html", tmp_path / "page.html"):
        html = page.read_text("utf-8")
        assert script not in html and "<img" not in html


def test_a_folder_as_data_file(invoke: Invoke, tmp_path: Path) -> None:
    assert_refused(invoke("train", tmp_path, "--out", tmp_path / "out"), "holds no text files")
    (tmp_path / "a.txt").write_text("of one\n" * 20)
    (tmp_path / "b.txt").write_text("and of another\n" * 20)
    files = (tmp_path / "a.txt", tmp_path / "b.txt")
    assert invoke("train", *files, *TINY, "--out", tmp_path / "run").code == 0
    resumed = invoke("train", *reversed(files), "--resume", "--out", tmp_path / "run")
    assert_refused(resumed, "b.txt", "a.txt", "leave it out to resume")


def test_lines_longer_than_the_context_are_cut_in_the_report_too(text: Path, invoke: Invoke, tmp_path: Path) -> None:
    outcome = invoke("train", text, *TINY, "--lines", "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "out" / "report.html").is_file()


def test_generate_continues_any_model(invoke: Invoke, tmp_path: Path) -> None:
    """One of transformers; what cannot be continued is said in one line."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 19, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3}
    folder = word_folder(tmp_path / "llama", "next")
    greedy = ("generate", folder, "--prompt", "the cat saw", "--tokens", 7, "--temperature", 0)
    expected = generate(folder, "the cat saw", 7, temperature=0)
    document = json.loads(invoke(*greedy, "--json").out)
    assert document["ids"][-7:] == expected and document["n_tokens"] == 7
    assert invoke(*greedy)[:2] == (0, document["text"] + "\n")
    (folder / "tokenizer.json").unlink()
    assert_refused(invoke(*greedy), "no tokenizer")
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=20))
    bert.save_pretrained(tmp_path / "bert")
    assert invoke("--version").code == 0  # takes away what saving printed
    assert_refused(invoke("generate", tmp_path / "bert", "--prompt", "w3"), "holds a BertForMaskedLM")


def test_an_error_nobody_thought_of_is_one_line_too(run: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug\nin two lines")

    monkeypatch.setattr(cli.heads, "surveyed", broken)
    outcome = invoke("heads", run)
    assert_refused(outcome, "a bug in two lines", "--debug", code=outcome.code)
    assert outcome.code != 0


@pytest.fixture
def half(text: Path, tmp_path: Path) -> Path:
    """A run that was stopped after its first step."""
    from headwise.gpt import run as package
    from headwise.gpt import train

    settings = package.Settings("nanogpt", (str(text),), steps=3, shape=SHAPE)

    def interrupt(progress: train.Progress) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(train.Stopped):
        package.run_training(tmp_path / "half", settings, interrupt)
    return tmp_path / "half"


SHAPE = {"n_heads": 2, "n_layers": 1, "d_model": 8, "context": 8}


def test_resume_with_another_option(half: Path, text: Path, invoke: Invoke, tmp_path: Path) -> None:
    before = contents(half)
    (other := tmp_path / "other.txt").write_text(TEXT)
    assert_refused(invoke("train", other, "--out", half, "--resume"), "text=", "cat.txt", "other.txt")
    for options, words in rows("other_options"):
        assert_refused(invoke("train", text, "--out", half, "--resume", *options.split()), *words)
    for command in ("generate", "heads"):
        assert_refused(invoke(command, half), "has not finished", "resume=True")
    assert contents(half) == before


def test_resume_of_a_finished_run_or_of_none(run: Path, invoke: Invoke, text: Path, tmp_path: Path) -> None:
    before = contents(run)
    assert_refused(invoke("train", "--out", run, "--resume"), "is finished; there is nothing to resume")
    assert contents(run) == before
    code, _, err = invoke("train", text, *TINY, "--out", tmp_path / "new", "--resume")
    assert code == 0 and "nothing to resume" in err.splitlines()[0]


def test_debug_lets_the_error_through(text: Path, invoke: Invoke) -> None:
    refuses(lambda: invoke("train", text, "--steps", 0, "--debug"), "steps=0 must be at least 1")


def test_ctrl_c_saves_and_resume_finishes(text: Path, run: Path, invoke: Invoke, tmp_path: Path) -> None:
    folder = tmp_path / "long"
    given = ("train", text, *TINY, "--steps", 150, "--out", folder)
    child = start(*given)
    assert child.stderr is not None
    while not child.stderr.readline().startswith("step "):  # of an evaluation
        pass
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=300)
    assert_refused(Outcome(child.returncode, out, err), "stopped after step", "saved", "--resume", code=130)
    stopped = int(re.findall(r"after step (\d+)", err)[0])
    assert 0 < stopped < 150 and (folder / "state.safetensors").is_file()
    code, out, err = invoke(*given, "--resume")
    assert code == 0, err
    assert int(re.findall(r"step (\d+)/150", err)[0]) > stopped
    assert not (folder / "state.safetensors").exists() and (folder / "model.safetensors").is_file()


def test_ctrl_c_before_the_first_step(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = run_module._interrupt_message

    def said_once(error: BaseException) -> str:
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # else a second Ctrl-C would end this in a traceback
        return message(error)

    monkeypatch.setattr(run_module, "_interrupt_message", said_once)
    monkeypatch.setattr("headwise.gpt.run.train", interrupted)
    outcome = invoke("train", "--steps", 3, "--out", tmp_path / "r")
    said = f"headwise: interrupted; go on with: headwise train --resume --out {tmp_path / 'r'}"
    assert outcome.code == 130 and said in outcome.err, outcome.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r"]


def test_ctrl_c_while_generating(run: Path) -> None:
    child = start("generate", run, "--prompt", "the", "--tokens", 10**7)
    assert child.stdout is not None and child.stderr is not None
    os.read(child.stdout.fileno(), 1)
    child.send_signal(signal.SIGINT)
    err = child.communicate(timeout=300)[1]
    assert child.returncode == 130 and err.strip() == "headwise: interrupted; no file was written"


def test_a_reader_that_goes_away(run: Path) -> None:
    for given in (("generate", run, "--prompt=the", "--tokens", 10**7), ("cost", "gpt2", "--json")):
        child = start(*given)
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == ""
        child.stderr.close()
        assert child.wait(30) in (0, 1, 141)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is missing: no full standard output to write to")
def test_standard_output_may_be_missing_or_full() -> None:
    outcome = process("cost", "gpt2", before=lambda: os.close(1), stdout=None)
    assert outcome.err == "" or outcome.err.startswith("headwise: ")
    assert "Traceback" not in outcome.err
    with Path("/dev/full").open("w") as full:
        outcome = process("cost", "gpt2", "--json", stdout=full)
    assert_refused(outcome, "cannot write")


@contextmanager
def limited(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes here: what a full disk does to a write, without a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_while_training(text: Path, invoke: Invoke, tmp_path: Path) -> None:
    folder = tmp_path / "full"
    with limited(2000):  # run.json and film.json are smaller, weights and state larger
        outcome = invoke("train", text, *TINY, "--out", folder)
    assert_refused(outcome, "cannot write", "File too large", "whole")
    assert sorted(contents(folder)) == ["film.json", "run.json"]
    assert json.loads((folder / "run.json").read_text())["status"] == "training"
    outcome = invoke("train", text, "--out", folder, "--resume")
    assert outcome.code == 0, outcome.err


def test_a_terminal_without_the_letters_shows_their_codes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for more in ((), ("--json",)):
        stream = io.TextIOWrapper(io.BytesIO(), "ascii")
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "argv", ["headwise", "generate", str(run), "--prompt", "niño", "--tokens", "0", *more])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = stream.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
        assert stop.value.code == 0
        assert json.loads(printed)["prompt"] == "niño" if more else printed == "ni\\xf1o\n"


def test_standard_input_is_a_text(run: Path, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def typed(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    typed(TEXT)
    assert invoke("train", "-", *TINY, "--out", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "text.txt").read_text() == TEXT
    typed("the cat")
    assert json.loads(invoke("heads", run, "--text", "-", "--json").out)["loss"]


def test_standard_input_replaces_no_text_and_leaves_none_of_a_refused_run(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def typed(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
        return invoke("train", "-", *arguments)

    folder, new = tmp_path / "mine", tmp_path / "new"
    folder.mkdir()
    (folder / "text.txt").write_text("my own")
    assert_refused(typed(*TINY, "--out", folder), "not empty")
    assert (folder / "text.txt").read_text() == "my own"
    assert_refused(typed("--width", 17, "--heads", 2, "--out", new), "does not divide")
    assert not new.exists()
    assert_refused(typed("--resume", "--out", new), "leave it out with --resume")


HOSTILE = "a\x1b[31mred\x9b0m\u202eback\ud800\x07"
SHOWN = r"a\x1b[31mred\x9b0m\u202eback\ud800\x07"


def test_no_control_character_reaches_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table()
    table.add_column("name")
    table.add_row(Text(HOSTILE.replace("\x07", "")))
    screen.print(HOSTILE)
    screen.print(table)
    err.print(Text(HOSTILE.replace("\x07", "")), soft_wrap=True)
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == SHOWN and printed.err.strip() == SHOWN.removesuffix(r"\x07")
    assert r"a\x1b[31mred" in printed.out.split("\n", 1)[1]
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", printed.out + printed.err)
    assert harmless("line\r\nnext\tcolumn") == "line\r\nnext\tcolumn"


def test_json_escapes_and_has_null_for_what_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json("name", {"name": HOSTILE, "word": "año"})
    text = capsys.readouterr().out
    assert json.loads(text) == {"schema": "headwise-name-1", "name": HOSTILE, "word": "año"} and "año" in text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", text)
    print_json("losses", {"loss": float("nan"), "bounds": [(1.5, float("inf")), {"low": float("-inf")}]})
    expected = {"schema": "headwise-losses-1", "loss": None, "bounds": [[1.5, None], {"low": None}]}
    assert json.loads(capsys.readouterr().out) == expected


def test_arguments_of_the_library_are_options_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"n_kv_heads": "--kv-heads", "out": "--out", "keep": "--keep", "uniform": "--uniform", "by": "--by"}
    monkeypatch.setattr(call, "options", options)
    for said, shown in rows("as_options"):
        assert in_options(said) == shown


def test_json_goes_to_what_has_no_encoding(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    monkeypatch.setattr(sys, "stdout", text := io.StringIO())
    assert invoke("cost", "gpt2", "--json").code == 0 and json.loads(text.getvalue())


def test_progress_has_milestones_and_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Progress("reading the text") as progress:
        progress("step", 1, 2)
        progress("step", 2, 2, "loss 0.5", milestone=True)
    assert capsys.readouterr().err == "step 2/2  loss 0.5\n"
    screen = io.StringIO()
    monkeypatch.setattr(err, "_file", screen)
    monkeypatch.setattr(err, "_force_terminal", True)
    monkeypatch.setattr(err, "is_interactive", True)
    with Progress("reading the text") as progress:
        progress("documents", 2, 5, "L1.H0")
        progress("documents", 5, 5, "L1.H0")
    assert "documents" in screen.getvalue() and "5/5" in screen.getvalue()
    # On a clock of its own: steps of 31 to 59 seconds, of a stage that was named long before.
    clock = [0.0]
    monkeypatch.setattr(err, "get_time", lambda: clock[0])
    with Progress("reading the text") as progress:
        progress("later", 0, 1)
        ends = list(itertools.accumulate([500, *random.Random(7).choices(range(31, 60), k=23)]))
        for done, end in enumerate(ends):
            clock[0] = end
            progress("later", done, 23)
            if 2 <= done < 23:
                left = progress._bar.tasks[0].time_remaining
                assert left is not None and (ends[-1] - end) / 2 < left < (ends[-1] - end) * 2


def test_the_shell_completes_commands() -> None:
    words = {run_module.COMPLETION: "complete_bash", "COMP_WORDS": "headwise pr", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "headwise"]
    shown = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True, timeout=300)
    assert "prune" in shown.stdout.split()


def test_the_help_of_each_command_has_an_example_with_options_that_exist(invoke: Invoke) -> None:
    for name in (name for names in app.DOORS.values() for name in names):
        listed, _, example = invoke(name, "--help").out.partition("Example:")
        options = re.findall(r"--[a-z-]+", example)
        assert example.split()[:2] == ["headwise", name] and "--json" in listed and "--debug" in listed
        assert [option for option in options if not re.search(rf"{option}\b", listed)] == [], name


def test_the_first_screen_and_common_options(invoke: Invoke) -> None:
    assert "--install-completion" in invoke("--help").out and "--show-completion" in invoke("--help").out
    screen = invoke("--help").out
    listed = {door: screen.split(f"{door}:\n")[1].split("\n\n")[0].splitlines() for door in app.DOORS}
    assert {door: tuple(line.split()[0] for line in lines) for door, lines in listed.items()} == app.DOORS
    lines = [line for lines in listed.values() for line in lines]
    assert len(lines) == len(app.app.registered_commands)
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)
    documents = [invoke(*words).out for words in (("cost", "gpt2", "--json"), ("--json", "cost", "gpt2"))]
    assert documents[0] == documents[1] and json.loads(documents[0])["model"] == "gpt2"
    assert "parameters" in invoke("cost", "gpt2").out  # and the next call is as it was
    refused = invoke("cost", "--", "--json")
    assert refused.code == 2 and "--json" in refused.err  # a name after --


def test_the_language_is_taken_from_before_two_dashes_alone() -> None:
    words = ["trace", "--lang=es", "--json", "--", "--lang=en", "--language=x"]
    assert run_module._hoisted(words) == ["--lang", "es", "--json", "trace", "--", "--lang=en", "--language=x"]


def test_threads_that_wait_leave_the_cores_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "run", lambda: None)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    cli.main()
    assert os.environ["OMP_WAIT_POLICY"] == "active"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    cli.main()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
