"""Pruning: the function of a gate of 0, in every way a format can carry it; what the cache does; what is refused."""

from collections.abc import Iterable

import pytest
import torch
from cases import refuses, refuses_table, rows
from reshape_models import BUILD, build, texts
from torch import nn

from headwise.gpt.gpt import GPT, GPTConfig
from headwise.heads.ablate import ablate
from headwise.models.ask import answers
from headwise.models.weights import attentions, head_counts, read_layers
from headwise.reshape.heal import cache_bytes
from headwise.reshape.prune import Gone, Pruning, chosen_heads, prune_heads, weakest

EVEN = ("L0.H1,L1.H2", ((1,), (2,)))
UNEVEN = ("L0.H1,L1.H0,L1.H2", ((1,), (0, 2)))


def named_heads(model: nn.Module, names: str) -> Gone:
    return chosen_heads(names, len(attentions(model)), head_counts(model)[0])


@torch.no_grad()
def gated(model: nn.Module, heads: Iterable[str]) -> torch.Tensor:
    """What the model answers with a gate of 0 on some heads."""
    with ablate(model, list(heads)):
        return answers(model, texts(1))


@torch.no_grad()
def difference(model: nn.Module, child: nn.Module, heads: Iterable[str]) -> float:
    return float((answers(child, texts(1)) - gated(model, heads)).abs().max())


@pytest.mark.parametrize("names", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("name", BUILD)
def test_pruning_is_a_gate_of_zero(name: str, names: tuple[str, Gone]) -> None:
    model = build(name)
    heads = named_heads(model, names[0])
    assert heads == names[1]
    pruned = prune_heads(model, heads)
    assert pruned.details["heads"] == names[0].split(",")
    # Angles and the scale of Gemma's embedding, which no file holds, were rounded to float32 in the parent alone.
    limit = 1e-5 if name in ("qwen3", "gemma3, tied") else 1e-9
    assert difference(model, pruned.model, pruned.details["heads"]) < limit
    with torch.no_grad():
        assert (gated(model, pruned.details["heads"]) - answers(model, texts(1))).abs().max() > 1e-3
    out = names is EVEN and name not in ("gpt2", "bert", "rope, GQA", "llama", "llama, tied", "llama, GQA")
    assert (not pruned.silent) == out
    assert head_counts(pruned.model)[0] == head_counts(model)[0] - out
    if not out:
        weights = read_layers(pruned.model)[1]
        assert (weights.wq[2] == 0).all() and (weights.wo[:, 2] == 0).all() and (weights.wk[2] != 0).any()


def test_groups_and_their_caches() -> None:
    model = build("rope, GQA")  # 12 query heads on 6
    pruned = prune_heads(model, named_heads(model, "L0.H2,L0.H3,L1.H10,L1.H11"))
    assert not pruned.silent
    assert head_counts(pruned.model) == (10, 5, 10)
    assert cache_bytes(pruned.model) * 6 == cache_bytes(model) * 5
    assert difference(model, pruned.model, pruned.details["heads"]) < 1e-9
    model = build("rope, GQA")
    heads = tuple(tuple(range(layer, 12, 2)) for layer in (0, 1))
    pruned = prune_heads(model, heads)
    assert not pruned.silent
    assert head_counts(pruned.model) == (6, 6, 10)
    assert difference(model, pruned.model, pruned.details["heads"]) < 1e-9
    assert cache_bytes(pruned.model) == cache_bytes(model)
    # Six heads divide the width of 24 and five do not: taken out, the folder could be read by headwise alone.
    config = GPTConfig(vocab_size=31, context=17, n_layers=1, n_heads=6, head_dim=10, d_model=24, d_ff=29)
    pruned = prune_heads(GPT(config), ((1,),))
    assert "num_attention_heads to divide hidden_size=24, and 5 does not" in pruned.notes[0]
    assert not prune_heads(GPT(config), ((1, 4),)).silent


@pytest.mark.parametrize(("name", "heads", "said"), rows("reasons_for_zeros"))
def test_what_no_format_carries_is_zeroed_with_the_reason(name: str, heads: str, said: str) -> None:
    model = build(name)
    chosen = named_heads(model, heads)
    pruned = prune_heads(model, chosen)
    assert said in pruned.notes[0]
    assert head_counts(pruned.model) == head_counts(model)
    refuses(lambda: prune_heads(model, chosen, uniform=True), r"leave out uniform=True to have the heads zeroed")


def scores(model: nn.Module) -> dict[str, float]:
    """A score for each head: those of a later layer are larger, and within a layer those of head 4."""
    n_layers, n_heads = len(read_layers(model)), head_counts(model)[0]
    return {f"L{n}.H{h}": 100.0 * n + (h - 4) ** 2 for n in range(n_layers) for h in range(n_heads)}


def test_ranking() -> None:
    model = build("rope")
    assert weakest(model, scores(model), 0.75, uniform=False) == ((3, 4, 5), ())
    assert weakest(model, scores(model), 0.67, uniform=True) == ((3, 4), (3, 4))
    assert weakest(model, scores(model), 0.75, uniform=True) == ((4,), (4,))  # 1.5 of 6: rather fewer than more
    model = build("rope")
    assert weakest(model, scores(model), 0.5, uniform=False) == ((1, 2, 3, 4, 5), (4,))
    model = build("rope, GQA")  # groups (0,1) (2,3) (4,5) ...; the weakest are (4,5), then (2,3)
    assert weakest(model, scores(model), 0.83, uniform=True) == ((4, 5), (4, 5))
    assert weakest(model, scores(model), 0.6, uniform=True) == ((2, 3, 4, 5), (2, 3, 4, 5))
    model = hw_mqa()
    assert weakest(model, scores(model), 0.75, uniform=True) == ((3, 4), (3, 4))
    assert not prune_heads(model, ((3, 4), (3, 4)), uniform=True).silent


def hw_mqa() -> nn.Module:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=31, context=17, n_layers=2, n_heads=8, n_kv_heads=1, head_dim=6, d_model=24, d_ff=29)
    return GPT(config).double().eval()


def test_names_that_are_no_heads_are_refused() -> None:
    refuses_table("heads", globals() | {"model": build("rope"), "grouped": build("rope, GQA"), "Pruning": Pruning})
