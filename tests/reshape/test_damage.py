"""What is measured: against a count, a cache, a dense map, a clock."""

import pytest
import torch
from reshape_models import BUILD, build, texts

from headwise import KVCache
from headwise.gpt.gpt import GPT
from headwise.models.ask import cache_in
from headwise.models.weights import head_counts, read_layers
from headwise.reshape.align import moments
from headwise.reshape.heal import cache_bytes, measure
from headwise.reshape.prune import prune_heads
from headwise.reshape.share import share_heads


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in BUILD if name != "bert"] + [("rope", torch.bfloat16), ("llama", torch.bfloat16)],
)
def test_the_bytes_of_a_cache_are_those_of_a_cache(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype=dtype)
    models = [model]
    if name != "gpt2":
        models.append(share_heads(model, 2, moments(model, [texts()])).model)
    ids = texts()[:, :5]
    for model in models:
        if isinstance(model, GPT):
            caches = [KVCache() for _ in model.blocks]
            model(ids, caches)
            held = sum(cache.nbytes for cache in caches)
        else:
            cache = cache_in(model(input_ids=ids, use_cache=True))
            held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
        assert held == cache_bytes(model) * ids.numel(), head_counts(model)


def test_models_without_caches_or_heads() -> None:
    parent = build("bert", dtype=torch.float32)
    child = prune_heads(parent, ((1,), ())).model
    damage = measure(parent, child, [texts()], 17)
    assert damage.loss is None
    assert damage.cache_bytes.before == damage.cache_bytes.after == 0
    assert damage.kl > 0
    assert damage.parameters.before == damage.parameters.after


def test_parameters_are_counted_once() -> None:
    model = build("llama, tied", dtype=torch.float32)
    child = share_heads(model, 3, moments(model, [texts()])).model
    damage = measure(model, child, [texts()], None)
    gone = sum(w.wk[3:].numel() + w.wv[3:].numel() for w in read_layers(model))
    assert damage.parameters.before - damage.parameters.after == gone
    assert damage.parameters.before == sum(p.numel() for p in model.parameters())
