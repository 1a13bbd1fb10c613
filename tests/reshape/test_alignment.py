"""What leaves a function as it is: turns of heads, their order; and what must not be turned."""

import pytest
import torch
import transformers as tf
from reshape_models import BUILD, ROTARY, build, far, texts
from torch import Tensor, nn

from headwise.models.weights import AttentionWeights, read_layers, with_layers
from headwise.reshape.align import activations, key_rule, moments
from headwise.reshape.share import aligned

CLOSE = {torch.float32: 1e-5, torch.float64: 1e-10}


def changed(model: nn.Module, change: dict[int, AttentionWeights]) -> nn.Module:
    layers = read_layers(model)
    return with_layers(model, [change.get(n, weights) for n, weights in enumerate(layers)])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in BUILD] + [(name, torch.float32) for name in ("rope", "qwen3", "gpt2", "bert")],
)
def test_alignment_leaves_the_function_as_it_is(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype=dtype)
    roots = [*moments(model, [texts()])]
    layers = [weights.widened() for weights in read_layers(model)]
    turned = [aligned(w, root, 1 if w.n_kv_heads == 3 else 2)[0] for w, root in zip(layers, roots, strict=True)]
    assert far(model, with_layers(model, turned)) < CLOSE[dtype]
    for before, after in zip(layers, turned, strict=True):
        assert (before.wv - after.wv).abs().max() > 0.1  # it did turn something
        if before.k_gain is None:
            assert (before.wk - after.wk).abs().max() > 0.1


@pytest.mark.parametrize("name", BUILD)
def test_the_order_of_heads_is_free(name: str) -> None:
    model = build(name)
    weights = read_layers(model)[1]
    order = torch.randperm(weights.n_kv_heads, generator=torch.Generator().manual_seed(3)).tolist()
    assert order != sorted(order)
    assert far(model, changed(model, {1: weights.permuted(order)})) < 1e-10


def test_features_that_rope_leaves_alone_are_aligned_too() -> None:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.4}
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**ROTARY, rope_parameters=rope)).double().eval()
    turned = [aligned(w, root, 2)[0] for w, root in zip(read_layers(model), moments(model, [texts()]), strict=True)]
    assert far(model, with_layers(model, turned)) < 1e-10


def test_moments_are_those_of_what_the_attention_reads() -> None:
    model = build("llama")
    seen: list[Tensor] = []
    hook = model.model.layers[1].self_attn.register_forward_pre_hook(  # type: ignore[union-attr]
        lambda module, args, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True
    )
    batches = [texts(0), texts(1)[:, :5]]
    roots = [*moments(model, batches)]
    hook.remove()
    x = torch.cat([x.flatten(0, 1) for x in seen])
    weights = read_layers(model)[1].widened()
    k, v = (x @ w.flatten(0, 1).T + b.flatten() for w, b in ((weights.wk, weights.bk), (weights.wv, weights.bv)))  # type: ignore[union-attr]
    by_moments = activations(weights, "k", roots[1]).flatten(0, 1)
    others = activations(weights, "v", roots[1]).flatten(0, 1)
    torch.testing.assert_close(by_moments @ others.T, k.T @ v / len(x))


@pytest.mark.parametrize("unequal", ["q_norm", "k_norm"])
def test_gains_of_queries_and_of_keys_both_hold_a_plane(unequal: str) -> None:
    """A turn of the keys is undone in the queries, so that it passes through both gains."""
    model = build("qk-norm")
    for change, planes in ((0.0, 1), (0.3, 0)):
        with torch.no_grad():
            for norm in ("q_norm", "k_norm"):
                gain = getattr(model.blocks[0].attention, norm).weight  # type: ignore[index, union-attr]
                gain[7] = gain[2] + (change if norm == unequal else 0.0)
        assert len(key_rule(read_layers(model)[0]).planes) == planes
