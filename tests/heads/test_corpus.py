"""A corpus passes in constant memory: documents lie on the disk, and what is kept of them are sums and the best."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import refuses
from helpers import watch_call
from small_models import assert_same, noisy, normal

import headwise as hw
from headwise.corpus.documents import Text
from headwise.gpt.gpt import GPT
from headwise.heads.survey import EXAMPLES, survey
from headwise.heads.table import Survey
from headwise.table import Table

V = 29


@pytest.fixture(scope="module")
def found(model: GPT, text: Text) -> Survey:
    return survey(model, text, controls=False, ablate="none")


def test_what_is_gleaned_is_what_the_maps_say(model: GPT, text: Text, found: Survey) -> None:
    """The best row of each document."""
    for layer in range(2):
        best: list[list[tuple[float, int, int, int]]] = [[], [], []]
        for number, ids in enumerate(text.documents):
            seen = watch_call(model, torch.tensor([ids]), maps=True)
            for h in range(3):
                p = seen[f"L{layer}.H{h}"].map
                rows = []
                for row, key in enumerate(p.argmax(1).tolist()):
                    if key not in (0, row):
                        rows.append((float(p[row, key]), number, row, key))
                best[h] += [max(rows)] if rows else []
        for h in range(3):
            head = found[f"L{layer}.H{h}"]
            expected = sorted(best[h], reverse=True)[:EXAMPLES]
            got = [(example.weight, example.document, example.row, example.key) for example in head.examples]
            assert [each[1:] for each in got] == [each[1:] for each in expected]
            assert [each[0] for each in got] == pytest.approx([each[0] for each in expected], abs=1e-6)
            first = head.examples[0]
            assert first.looks == f"t{text.documents[first.document][first.row]}"


def test_frames(found: Survey, model: GPT, text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = found.to_frame()
    assert list(heads.name) == list(found)
    row = heads[heads.name == "L1.H2"].iloc[0]
    score = found["L1.H2"].entropy
    assert (row.entropy, row.entropy_low, row.entropy_high) == (score.mean, score.low, score.high)
    assert heads.isna().ablation.all() and row.roles == "; ".join(found["L1.H2"].roles)
    assert f"{score.mean:.3f}" in found.text() and "roles" in found.text() and "<table>" in found._repr_html_()
    table = Table.of(found.records()).csv().splitlines()
    assert table[0].split(",") == list(heads.columns) and len(table) == 7
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    refuses(lambda: found.to_frame(), "needs pandas: pip install")


def test_whole_maps_on_request(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(V, (2, 13), generator=torch.Generator().manual_seed(2))
    seen = watch_call(model, ids, maps=True)
    head = seen["L1.H1"]
    assert head.map.shape == (2, 13, 13) and head.map.sum(2) == pytest.approx(np.ones((2, 13)), abs=1e-6)
    for one, alone in zip(head.map, ids, strict=True):  # of each document, as it is by itself
        assert one == pytest.approx(watch_call(model, alone[None], maps=True)["L1.H1"].map, abs=1e-6)
    monkeypatch.setattr("headwise.heads.watch.MOST_WEIGHTS", 168)
    said = r"up to 168 weights a head, and here 13 tokens look at 13, 169 weights; .* list some rows \(maps=\[-1\]\)"
    with pytest.raises(hw.HeadwiseError, match=said), hw.watch(model, maps=True), torch.no_grad():
        model(ids)
    with hw.watch(model, maps=[7, 50]) as seen, torch.no_grad():
        model(ids)
        model(ids[:, :1])  # has no row 7: the map is that of the call before
    assert seen["L1.H1"].map == pytest.approx(head.map[:, 7:8], abs=1e-6) and seen["L1.H1"].n_rows == 28


def test_maps_of_a_batch_are_in_the_graph() -> None:
    """Their gradients are those of the dense formula, and NumPy reads them as an array."""
    layer, x = noisy(3, mask=hw.Causal(), n_kv_heads=1, q_bias=True), normal(2, 13, 31)
    with hw.watch(layer, maps=True) as seen:
        layer(x)
    maps = seen["L0.H2"].map
    q = F.linear(x, layer.q_proj.weight, layer.q_proj.bias)[..., 20:]
    scores = q @ F.linear(x, layer.k_proj.weight).mT / 10**0.5
    dense = scores.masked_fill(torch.ones(13, 13).triu(1) > 0, -torch.inf).softmax(-1)
    assert np.asarray(maps) == pytest.approx(dense.detach().numpy(), abs=1e-6)
    wanted = [layer.q_proj.weight, layer.q_proj.bias, layer.k_proj.weight]
    factors = normal(2, 13, 13, seed=5)
    ours, theirs = (torch.autograd.grad((factors * each).sum(), wanted) for each in (maps, dense))
    for got, expected in zip(ours, theirs, strict=True):
        assert_same(got.as_subclass(torch.Tensor), expected)
    layer.requires_grad_(False)
    with hw.watch(layer, maps=True) as seen:
        layer(x[:1])
    assert isinstance(seen["L0.H2"].map, np.ndarray) and seen["L0.H2"].map.shape == (13, 13)
