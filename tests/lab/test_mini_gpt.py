"""The Mini-GPT in NumPy: its gradient by hand is torch's, it learns, and its folder is read like any run."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import refuses

from headwise.corpus.training import verb_corpus
from headwise.gpt.run import load_run
from headwise.lab.courses import mini_gpt
from headwise.lab.microgpt.array import Model
from headwise.lab.microgpt.tensor import build, name_of

LINES = [[7, 0, 3, 1, 7], [7, 2, 2, 5, 4, 6, 0, 7], [7, 1, 7]]  # of unequal lengths; 7 is the end
WIDTH, LAYERS = 20, 3


def test_batches_and_their_gradients() -> None:
    inputs, following = mini_gpt.batch(LINES)
    assert inputs.reshape(3, -1).tolist()[0] == [7, 0, 3, 1, 0, 0, 0]
    assert following.reshape(3, -1).tolist()[2] == [1, 7, -1, -1, -1, -1, -1]
    weights = mini_gpt.first_weights(8, seed=3, width=WIDTH, n_layers=LAYERS)
    ours, theirs = Model(weights, mini_gpt.N_HEADS), build(weights, mini_gpt.N_HEADS)
    inputs, following = mini_gpt.batch(LINES)
    loss = ours.gradient(inputs, following, n_texts=3)
    logits = theirs(torch.tensor(inputs).view(3, -1))
    expected = F.cross_entropy(logits.flatten(0, 1), torch.tensor(following), ignore_index=-1)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for key, slope in ours.slopes.named.items():
        gradient = theirs.get_parameter(name_of(key)).grad.numpy()
        assert np.abs(gradient).max() > 1e-6, f"{key} is not tested by this"
        np.testing.assert_allclose(slope, gradient, rtol=0, atol=1e-12, err_msg=key)


def test_an_update_with_decay_is_adamw() -> None:
    weights = mini_gpt.first_weights(8, seed=3, width=WIDTH, n_layers=1)
    ours, theirs = Model(weights, mini_gpt.N_HEADS), build(weights, mini_gpt.N_HEADS)
    adam = torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=(0.85, 0.99), eps=1e-8, weight_decay=0.7)
    inputs, following = mini_gpt.batch(LINES)
    for _ in range(3):
        ours.gradient(inputs, following, n_texts=3)
        ours.update(0.01, 0.7)
        adam.zero_grad()
        logits = theirs(torch.tensor(inputs).view(3, -1))
        F.cross_entropy(logits.flatten(0, 1), torch.tensor(following), ignore_index=-1).backward()
        adam.step()
    for key, matrix in ours.weights.named.items():
        expected = theirs.get_parameter(name_of(key)).detach().numpy()
        np.testing.assert_allclose(matrix, expected, rtol=0, atol=1e-9, err_msg=key)


@pytest.mark.slow
def test_it_learns_and_its_folder_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("mine")
    refuses(lambda: mini_gpt.main(tmp_path, steps=12), "is not empty")
    assert (tmp_path / "text.txt").read_text() == "mine"
    mini_gpt.main(tmp_path / "mini", steps=12)
    losses = [float(line.rsplit(" ", 1)[1]) for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert losses[0] > 5 and losses[-1] < losses[0] - 1
    model, tokens = load_run(tmp_path / "mini")
    assert len(tokens) == len(verb_corpus(0, 16, core=True).tokens) == model.config.vocab_size
    config = model.config
    assert (config.n_layers, config.n_heads, config.d_model, config.feed_forward_width) == (2, 4, 64, 256)
    inputs, following = mini_gpt.batch(
        [tokens.document(line) for line in ("I work = yo trabajo", "he works = él trabaja")]
    )
    with torch.no_grad():
        logits = model(torch.tensor(inputs).view(2, -1))
    loss = F.cross_entropy(logits.flatten(0, 1), torch.tensor(following), ignore_index=-1).item()
    assert loss == pytest.approx(losses[-1], abs=1)  # the words have the ids of the tokenizer
