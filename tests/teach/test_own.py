"""A learner's class in the GPT: the same model as with our layer, the same training, and a run like any other."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from casebook import correct_code, targets
from cases import every, refuses, rows
from invoking import Invoke
from small_models import COURSES_FILE

from headwise.cli.train import free_folder
from headwise.errors import HeadwiseError
from headwise.gpt.checkpoint import hf_form
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import find_preset
from headwise.heads.effect import ablate
from headwise.models.open import open_model
from headwise.teach.bugs import UncheckedError
from headwise.teach.check import read_request, read_target, request_of
from headwise.teach.exercises import find_exercise
from headwise.teach.own import SHAPE, Learner, carried, fitted, train_apart
from headwise.teach.subject import Options, Target

SMALL = {"d_model": 24, "d_ff": 23, "context": 13}
CONFIG = GPTConfig(vocab_size=11, **{**find_preset("course").shape, **SHAPE, **SMALL})
TEXTS = [[3, 7, 1, 10, 0], [5, 2, 2]]

UNUSUAL = tomllib.loads(Path(__file__).with_name("unusual.toml").read_text(encoding="utf-8"))

# Classes by the names of the courses, each in words of its own.
COURSES = COURSES_FILE.read_text(encoding="utf-8")


def target_in(path: Path, name: str = "") -> Target:
    """What a file has to be trained, loaded in this process."""
    target, load = read_request(request_of(read_target(f"{path}:{name}" if name else str(path), Options())))
    load()
    return target


def exercise(folder: Path, *changes: tuple[str, str]) -> Target:
    path, text = folder / "11_torch.py", find_exercise(11).source("en", True, "b")
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path.write_text(text)
    return target_in(path)


def shaken(learner: Learner) -> GPT:
    """A model with a class of a learner, with weights that no training gave."""
    torch.manual_seed(5)
    model = learner.model(learner.config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    return model


def test_a_right_class_is_our_layer_forward_and_backward(tmp_path: Path) -> None:
    target = exercise(tmp_path)
    learner = fitted(target, CONFIG)
    assert learner.config == CONFIG and hf_form(CONFIG) == "gpt2"
    theirs = shaken(learner)
    ours = carried(theirs, target, TEXTS).model
    ids = torch.tensor(TEXTS[:1])
    torch.testing.assert_close(theirs(ids), ours(ids), rtol=0, atol=1e-5)
    for model in (theirs, ours):
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
    for number, block in enumerate(ours.blocks):
        slope: Any = theirs.blocks[number].attention.module
        torch.testing.assert_close(slope.W_key.weight.grad, block.attention.k_proj.weight.grad, rtol=0, atol=1e-6)
        torch.testing.assert_close(slope.out_proj.bias.grad, block.attention.o_proj.bias.grad, rtol=0, atol=1e-6)


def test_its_first_weights_are_those_that_a_gpt_draws(tmp_path: Path) -> None:
    change = "self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)"
    target = exercise(tmp_path, (change, f"{change}; nn.init.normal_(self.W_query.weight, std=9)"))
    module: Any = fitted(target, CONFIG).attention().module
    for linear, std in ((module.W_query, CONFIG.init_std), (module.out_proj, CONFIG.init_std / 2)):
        assert 0.8 < linear.weight.std() / std < 1.2
    assert not module.out_proj.bias.any() and not module.W_value.bias.any() and module.dropout.p == CONFIG.dropout


def test_what_was_learned_is_carried_over_or_refused(tmp_path: Path) -> None:
    target = exercise(tmp_path)
    refuses(lambda: train_apart(tmp_path, target, 1, print), "exists and is not empty")  # the file is in it
    model = shaken(fitted(target, CONFIG))
    result = carried(model, target, TEXTS)
    assert result.logits < 1e-5 and result.maps is not None and result.maps < 1e-6
    model.position_embedding.weight.data[4] = torch.nan  # a place that the second of these texts alone has
    refuses(lambda: carried(model, target, TEXTS[::-1]), "logits differ by nan")
    first: Any = model.blocks[0].attention
    first.module.forward = lambda x: x * 2
    refuses(lambda: carried(model, target, TEXTS), "no correct form that headwise knows gives its numbers")


@every("changes", [(layout,) for layout in UNUSUAL["layouts"]])
def test_other_layouts_of_the_same_weights_are_carried_over(changes: Any, tmp_path: Path) -> None:
    target = exercise(tmp_path, *changes[0])
    model = shaken(fitted(target, CONFIG))
    result = carried(model, target, TEXTS)
    assert result.logits < 1e-5 and result.maps is not None and result.maps < 1e-6


@every(
    "name, n_heads",
    [("CausalAttention", 1), ("MultiHeadedAttentionWrapper", 4), ("MultiHeadAttn", 4), ("MultiHeadAttention", 4)],
)
def test_classes_by_the_names_of_the_courses_stand_in_a_gpt(name: str, n_heads: int, tmp_path: Path) -> None:
    path = tmp_path / "attention.py"
    path.write_text(COURSES)
    target = target_in(path, name)
    learner = fitted(target, CONFIG)
    assert learner.config.n_heads == n_heads
    model = shaken(learner)
    result = carried(model, target, TEXTS)
    assert result.logits < 1e-5 and result.maps is not None and result.maps < 1e-6
    sites = {1: ["L0.H0"], 4: ["heads1.L0.H0"] if "Wrapper" in name else ["L0.H1"]}[n_heads]
    with ablate(model, sites), torch.no_grad():
        without = model(torch.tensor(TEXTS[:1]))
    with ablate(result.model, [f"L0.H{min(1, n_heads - 1)}"]), torch.no_grad():
        torch.testing.assert_close(result.model(torch.tensor(TEXTS[:1])), without, rtol=0, atol=1e-5)


LATER, INPUT, SHAPES = "sees_later", "adds_input", "returns_shape"
# Why a right class cannot learn to predict the next token.
REFUSED = dict.fromkeys(("interleaved", "lengths", "context"), LATER) | {"residual": INPUT, "cross": SHAPES}
REFUSED = {f"correct_{style}": why for style, why in REFUSED.items()}
REFUSED |= dict.fromkeys(("fused_einops", "packed_image", "padded_list", "padded_torch", "torch_module"), LATER)
REFUSED |= {"correct_parameters": ""}  # it takes one text without a batch: torch itself says so


@pytest.mark.slow
def test_right_classes_of_many_styles_stand_in_a_gpt_or_are_refused_by_name() -> None:
    refused: dict[str, str] = {}
    count = 0
    for target in targets():
        style = target.source.path.removeprefix("<learner_").removesuffix("_0>")
        count += 1
        try:
            model = shaken(fitted(target, CONFIG))
        except Exception as error:  # one of them is torch's own
            refused[style] = error.key if isinstance(error, UncheckedError) else ""
            continue
        result = carried(model, target, TEXTS)
        assert result.logits < 1e-5 and result.maps is not None and result.maps < 1e-5, style
    page = (Path(__file__).parents[2] / "docs" / "check.md").read_text(encoding="utf-8")
    assert refused == REFUSED and f"{count - len(refused)} stand in the GPT and {len(refused)} are refused" in page


def test_constants_of_a_file_are_sizes_and_a_class_too_wide_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "attention.py"
    text = f"{COURSES}\n\nn_embd = 300\n\n\nclass OwnAttention(MultiHeadAttn):\n    def __init__(self, num_heads):\n"
    text += "        super().__init__(n_embd, n_embd, 64, 0.0, num_heads)\n"
    path.write_text(text)
    assert fitted(target_in(path, "OwnAttention"), CONFIG).config.d_model == 24
    path.write_text(text.replace("(n_embd, n_embd", "(300, 300"))
    with pytest.raises(UncheckedError, match="300 wide by sizes of its own, and at most 128"):
        fitted(target_in(path, "OwnAttention"), CONFIG)


@every("old, new, said", UNUSUAL["no_gpt"])
def test_what_cannot_stand_in_a_gpt_is_refused_by_name(old: str, new: str, said: str, tmp_path: Path) -> None:
    target = exercise(tmp_path, (old, new))
    with pytest.raises(UncheckedError, match=said):
        fitted(target, replace(CONFIG, context=7))


@pytest.mark.slow
@every("ending, said", rows("endings_of_files"))
def test_the_class_learns_behind_the_guard(ending: str, said: str, tmp_path: Path) -> None:
    path, outside = tmp_path / "11_torch.py", tmp_path / "outside"
    path.write_text(find_exercise(11).source("en", True, "b") + ending.format(outside=outside) + "\n")
    with pytest.raises(HeadwiseError, match=re.escape(said.format(outside=outside))):
        train_apart(tmp_path / "model", read_target(str(path), Options()), 2, lambda progress: None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["11_torch.py"]


@pytest.mark.slow
def test_the_command_trains_it_and_writes_the_report(invoke: Invoke, tmp_path: Path) -> None:
    folder = tmp_path / "learn"
    assert invoke("learn", folder, "--lang", "es").code == 0
    assert invoke("learn", folder, "--train").code != 0  # nothing is filled in yet
    apart = "import sys\nassert 'pytest' not in sys.modules  # it does not run in this process\n"
    text = find_exercise(11).source("es", True, "b").replace("MultiHeadAttention", "MultiHeadAttn")
    (folder / "11_torch.py").write_text(text + apart, encoding="utf-8")
    outcome = invoke("learn", folder, "--train", "--steps", 2, "--json")
    document = json.loads(outcome.out)
    assert outcome.code == 0 and document["difference"] < 1e-4 and document["maps_difference"] < 1e-5
    page = Path(document["report"]).read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and 'lang="es"' in page[:200]
    assert isinstance(open_model(folder / "model"), GPT)
    assert free_folder(folder / "model") == folder / "model-2"


@pytest.mark.slow
def test_check_watches_a_right_class_alone(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = tmp_path / "attention.py", tmp_path / "runs" / "own"
    path.write_text(COURSES)
    spec = f"{path}:MultiHeadedAttentionWrapper"
    # The page is that of `learn --train`, above.
    monkeypatch.setattr("headwise.cli.teach.write_report_of", lambda folder: folder / "report.html")
    outcome = invoke("check", spec, "--watch", "--steps", 2, "--out", folder)
    assert outcome.code == 0 and "right" in outcome.out and "Your heads" in outcome.out
    assert isinstance(open_model(folder), GPT)
    path.write_text(COURSES.replace("query.shape[-1] ** 0.5", "x.shape[-1] ** 0.5"))
    wrong = invoke("check", f"{path}:MultiHeadAttn", "--watch", "--out", tmp_path / "wrong")
    assert wrong.code == 1 and "scale-model-width" in wrong.out and "once it is right" in wrong.err
    path.write_text(correct_code("fused_einops"))
    refused = invoke("check", path, "--watch", "--out", tmp_path / "wrong", "--json")
    assert refused.code == 2 and "a token sees later ones" in refused.err, refused
    told = json.loads(refused.out)
    assert told["right"] is True and told["watched"] is None
    assert not (tmp_path / "wrong").exists()


@every(
    "text, said",
    [
        ("class Attention:\n    def forward(self, x):\n        return x\n", "is no nn.Module"),
        ("def attention(q, k, v):\n    return v\n", "is no nn.Module"),
    ],
)
def test_what_nothing_trains_is_refused_before_anything_runs(
    text: str, said: str, invoke: Invoke, tmp_path: Path
) -> None:
    path = tmp_path / "attention.py"
    path.write_text(text + "open('ran', 'w')\n")
    outcome = invoke("check", path, "--watch")
    assert outcome.code == 2 and said in outcome.err and "right" not in outcome.out
    assert "no es un nn.Module" in invoke("check", path, "--watch", "--lang", "es").err
    assert "--steps goes with --watch" in invoke("check", path, "--steps", 3).err
