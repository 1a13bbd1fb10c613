"""A job from end to end: which text serves for what, how heads are chosen, what is refused before work begins."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from reshape_models import BERT, BUILD, GPT2, OWN, ROTARY, build
from surveys import survey_of
from torch import Tensor, nn

from headwise import HeadwiseError
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.tokens import Tokens
from headwise.gpt.train import Stopped
from headwise.heads.effect import ablation
from headwise.models.open import Folder, remember
from headwise.reshape import job, prune, share
from headwise.reshape.job import Job
from headwise.reshape.prune import Pruning, head_scores
from headwise.reshape.report import Options
from headwise.reshape.share import Sharing
from headwise.reshape.text import Calibration, read_calibration
from headwise.reshape.workplace import Workplace

LETTERS = "abcdefghijklmnopqrstuvwxyz .,!\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(31, (17 * 97,), generator=generator).tolist()
    (tmp_path / "text.txt").write_text("".join(LETTERS[n] for n in letters))
    return tmp_path / "text.txt"


def opened(model: nn.Module, monkeypatch: pytest.MonkeyPatch, path: Path = Path("source")) -> Folder:
    """A model as if it came from a folder, which has no files."""
    monkeypatch.setattr(job.Job, "_weights_folder", lambda self: None)
    return remember(model, path, Tokens.characters(LETTERS, boundary=False), "headwise")


def documents(batches: Sequence[Tensor]) -> set[tuple[int, ...]]:
    return {tuple(ids.tolist()) for batch in batches for ids in (batch if batch.ndim == 2 else batch[None])}


@pytest.mark.slow
def test_each_part_of_the_text_serves_for_one_thing(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups and heads are chosen on one part, the child learns from it, the best weights are chosen on another, and
    what is reported is measured on a third."""
    folder = opened(build("rope", dtype=torch.float32), monkeypatch)
    parts = read_calibration(text, folder)
    train, chosen, reported = documents(parts.train), documents(parts.held_out[1::2]), documents(parts.held_out[::2])
    assert len(train) == 88 and len(chosen) == 5 and len(reported) == 5
    assert not train & chosen and not train & reported and not chosen & reported
    seen: dict[str, list[set[tuple[int, ...]]]] = {"moments": [], "learned": [], "chosen": [], "measured": []}

    def moments(model: nn.Module, batches: Sequence[Tensor], whole: Any = share.moments) -> Any:
        seen["moments"].append(documents(batches))
        return whole(model, batches)

    def heal(parent: Any, child: Any, learned: Any, held_out: Any, *rest: Any, whole: Any = job.Healing) -> Any:
        seen["learned"].append(documents(learned))
        seen["chosen"].append(documents(held_out))
        return whole(parent, child, learned, held_out, *rest)

    def measure(parent: Any, child: Any, held_out: Any, *rest: Any, whole: Any = job.measure) -> Any:
        seen["measured"].append(documents(held_out))
        return whole(parent, child, held_out, *rest)

    def survey(model: Any, text: Any, *rest: Any, whole: Any = prune.survey, **more: Any) -> Any:
        seen["moments"].append({tuple(ids) for ids in text.documents})
        return whole(model, text, *rest, **more)

    monkeypatch.setattr(share, "moments", moments)
    monkeypatch.setattr(prune, "survey", survey)
    monkeypatch.setattr(job, "Healing", heal)
    monkeypatch.setattr(job, "measure", measure)
    monkeypatch.setattr(job, "export", lambda *arguments: "not verified")
    share.share(folder.model, 3, method="aligned", text=text, out=tmp_path / "out", heal=2)
    prune.prune(folder.model, keep=0.75, by="role", text=text)
    assert seen == {
        "moments": [train, train],
        "learned": [train],
        "chosen": [chosen],
        "measured": [reported, reported, reported],
    }


@pytest.fixture
def calibration() -> Calibration:
    ids = torch.randint(31, (6, 13), generator=torch.Generator().manual_seed(1))
    return Calibration(tuple(ids[:4]), tuple(ids[4:]), 13, 31)


def test_scores_by_ablation_are_the_loss_without_the_head(
    calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(build("rope", dtype=torch.float32), monkeypatch)
    found = head_scores("ablation", folder, calibration)
    wanted = ablation(folder.model, calibration.statistics)
    assert found == {name: change.mean for name, change in wanted.items()} and len(set(found.values())) > 6


def test_heads_with_a_role_are_kept_first_and_importance_decides_among_equals(
    calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(build("rope", dtype=torch.float32), monkeypatch)
    profiles = survey_of(1, 4).profiles
    given = [((), 0.9), (("self",), 0.1), ((), 0.2), (("self",), 0.3)]
    made = tuple(replace(p, roles=roles, importance=x) for p, (roles, x) in zip(profiles, given, strict=True))
    monkeypatch.setattr(prune, "survey", lambda *arguments, **more: replace(survey_of(1, 4), profiles=made))
    found = head_scores("role", folder, calibration)
    assert sorted(found, key=lambda name: found[name]) == ["L0.H2", "L0.H0", "L0.H1", "L0.H3"]


NANOGPT: Any = {"norm": "layer", "position": "learned", "activation": "gelu", "gated": False}
REFUSED: list[tuple[Any, Any, str]] = [
    (
        lambda: tf.BertForQuestionAnswering(tf.BertConfig(**BERT)),
        Pruning("L0.H1"),
        "BertForQuestionAnswering answers with something other than tokens",
    ),
    (
        lambda: tf.LlamaForSequenceClassification(tf.LlamaConfig(**ROTARY)),
        Sharing(3, "mean", "adjacent"),
        "LlamaForSequenceClassification answers with something other than tokens",
    ),
    (
        lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True)),
        Pruning("L0.H1"),
        "scale_attn_by_inverse_layer_idx",
    ),
    (
        BUILD["bert"],
        Pruning(keep=0.75),
        "by='importance' needs the loss of a next token, and BertForMaskedLM predicts none",
    ),
    (
        BUILD["llama"],
        Pruning(keep=0.8, uniform=True),
        "num_attention_heads to divide hidden_size=24, and 5 does not; 1, 2, 3, 4 would; leave out --uniform",
    ),
    (
        lambda: GPT(GPTConfig(**OWN | {"head_dim": None, "d_model": 24}, **NANOGPT)),
        Sharing(3, "mean", "adjacent"),
        "gpt2's config has no num_key_value_heads",
    ),
]


@pytest.mark.parametrize(("make", "change", "said"), REFUSED, ids=[said[:30] for _, _, said in REFUSED])
def test_what_cannot_be_done_is_said_before_a_text_is_read(make: Any, change: Any, said: str) -> None:
    model = make().eval()
    with pytest.raises(HeadwiseError) as refusal:
        Job(model, change, Options(text=Path("no such text"))).run()
    assert said in str(refusal.value)


def test_ctrl_c_while_w_o_is_fitted_stops_there(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened(build("rope", dtype=torch.float32), monkeypatch, tmp_path / "source").model

    def press(*arguments: object) -> None:
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr("headwise.reshape.heal.refit", press)
        share.share(model, 3, method="mean", text=text, out=tmp_path / "out", heal=0, refit=200)
    assert not (tmp_path / "out").exists() and (tmp_path / "out.partial" / "heal.safetensors").exists()
    with Workplace(tmp_path / "source", tmp_path / "out", force=False) as workplace:
        assert workplace.has_state
