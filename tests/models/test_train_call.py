"""Training from Python: what a run folder holds, and what stays when there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import refuses
from torch import nn

import headwise as hw
from headwise import HeadwiseError
from headwise.gpt.run import read_run
from headwise.models.open import described, generate, open_model, train

TEXT = "the cat sat on the mat\n" * 19
SHAPE = {"n_layers": 1, "n_heads": 2, "d_model": 8, "context": 7}


def test_a_training_in_python(tmp_path: Path) -> None:
    (tmp_path / "cat.txt").write_text(TEXT)
    models = [
        train(text, "nanogpt", steps=3, **SHAPE) for text in (TEXT, tmp_path / "cat.txt", str(tmp_path / "cat.txt"))
    ]
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in models]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
    assert not models[0].training and models[0].config.d_model == 8
    folder = described(models[0])
    assert folder is not None and not folder.path.exists()
    assert len(generate(models[0], "the ", 5)) == 5
    assert list(tmp_path.iterdir()) == [tmp_path / "cat.txt"]
    model = train(TEXT, "nanogpt", tmp_path / "run", steps=3, seed=5, lines=True, **SHAPE)
    folder, run = described(model), read_run(tmp_path / "run")
    assert folder is not None and folder.path == tmp_path / "run" and run is not None
    assert (tmp_path / "run" / "text.txt").read_text() == TEXT
    settings = {"preset": "nanogpt", "seed": 5, "steps": 3, "lines": True, "shape": SHAPE}
    assert settings.items() <= vars(run.settings).items() and run.status == "finished"
    again = open_model(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    model = train(steps=1, n_layers=1, d_model=8, n_heads=2)
    assert generate(model, "I work =", 1)[0] >= 0


def test_what_does_not_fit_is_refused_and_another_folder_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for text in (TEXT, None):
        with pytest.raises(HeadwiseError, match="not empty"):
            train(text, out=tmp_path)
    refuses(lambda: train(TEXT, "nanogpt", tmp_path / "run", n_heads=3), "n_heads=3 does not divide")
    refuses(lambda: train(preset="lama"), "no preset 'lama'; did you mean")
    refuses(lambda: train("bok"), "bok does not exist")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["thesis.txt"]
    assert train(TEXT, "nanogpt", tmp_path / "run", steps=1, **SHAPE)


class Course(nn.Module):
    """As a course writes it: the mask is its own, and it knows no cache."""

    def __init__(self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.W_query, self.W_key, self.W_value, self.out_proj = (nn.Linear(d_in, d_out) for _ in range(4))
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            f(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_query, self.W_key, self.W_value)
        )
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(self.mask.bool()[: x.shape[1], : x.shape[1]], -torch.inf)
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Masked(nn.Module):
    """As the paper's translations write it: three inputs, and a mask of what may be seen."""

    def __init__(self, h: int, d_model: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.attention = Course(d_model, d_model, 1, dropout, h)
        del self.attention.mask

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> tuple[torch.Tensor, None]:
        self.attention.mask = mask == 0
        return self.attention(q), None


class Later(nn.Module):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x.mean(1, keepdim=True).expand_as(x))


class Configured(Masked):
    """Nobody can tell what its config holds; a class that says it fits."""

    def __init__(self, config: Any) -> None:
        super().__init__(config["heads"], config["width"])


class Adapted(Configured):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__({"heads": n_heads, "width": d_model})


@pytest.mark.parametrize("kind", [Course, Masked, Adapted])
def test_a_class_of_ones_own_is_trained_watched_and_continued(tmp_path: Path, kind: type[nn.Module]) -> None:
    model = train(TEXT, "nanogpt", tmp_path / "run", steps=3, attention=kind, **SHAPE)
    with hw.watch(model) as seen:
        logits = model(torch.tensor([[3, 1, 4, 1, 5]]))
    assert list(seen) == ["L0.H0", "L0.H1"]
    changed = model(torch.tensor([[3, 1, 4, 1, 2]]))
    assert torch.allclose(logits[:, :-1], changed[:, :-1]) and not torch.allclose(logits[:, -1], changed[:, -1])
    ids, expected = [3, 1], []
    for _ in range(4):
        expected.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        ids.append(expected[-1])
    assert list(hw.generate(model, [3, 1], 4, temperature=0)) == expected
    assert set(hw.survey(model, controls=False)) == {"L0.H0", "L0.H1"}
    again = open_model(tmp_path / "run")
    assert torch.equal(again(torch.tensor([ids])), model(torch.tensor([ids])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwise.gpt.gpt._classes", {})  # as in another process
        refuses(lambda: open_model(tmp_path / "run"), "headwise runs no code that a folder names")


def test_a_class_that_does_not_fit_is_refused_by_name() -> None:
    refuses(lambda: train(TEXT, "nanogpt", attention=Later, steps=1, **SHAPE), "Later cannot .*: it sees later tokens")
    refuses(lambda: train(TEXT, "nanogpt", attention=Configured, steps=1, **SHAPE), "Configured wants config=")
    refuses(lambda: train(TEXT, "nanogpt", attention=len, steps=1, **SHAPE), "is no class of torch modules")  # type: ignore[arg-type]
