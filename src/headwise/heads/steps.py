"""The arithmetic of one head at one position, number by number; and a small model to show it on.

The model is copied to double precision and run once on the text. `observe` hands over what the layer's attention was
given, and torch's hooks what the modules around it read and give. `trace` of the tensor rung gives the steps from
scores to weights. The stages of a query or key before that, which no run shows, are computed here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.corpus.tokens import Tokens
from headwise.corpus.training import Documents
from headwise.errors import HeadwiseError
from headwise.files import packaged, read_text
from headwise.gpt.gpt import GPT, Block, GPTConfig
from headwise.gpt.presets import find_preset
from headwise.gpt.train import fit, one_thread
from headwise.heads.watch import require_text
from headwise.layer.layer import MultiHeadAttention
from headwise.models.hook import observe
from headwise.positions import RoPE
from headwise.records import Call, HeadSteps, KeySteps, VectorStage
from headwise.rungs.tensor import trace

EXAMPLE_STEPS = 200  # updates that `example_model` is trained for: about a second; more would make a better model
EXAMPLE_SEED = 0  # of its weights and batches


class _Seen(NamedTuple):
    """What a run of the double-precision copy left behind; T tokens, width C of the model."""

    layer: MultiHeadAttention
    call: Call
    x: Tensor  # (T,C) the residual stream before the layer
    normed: Tensor  # (T,C) what the layer reads
    out: Tensor  # (T,C) what the layer gives
    x_new: Tensor  # (T,C) the residual stream after it


@torch.no_grad()
def head_steps(
    model: GPT, ids: Sequence[int], tokens: Sequence[str], layer: int, head: int, at: int, name: str
) -> HeadSteps:
    """Every step of head `head` of layer `layer` at position `at` of the ids (T,).

    `tokens` are the ids as text, one by one, and `name` is what a reader calls the model.

    Vaswani et al. 2017 (arXiv 1706.03762), section 3.2; W_O as a sum over heads: Elhage et al. 2021, "A Mathematical
    Framework for Transformer Circuits". Computed in float64 on a copy; the model is left as it is, and its own numbers
    agree to its own precision. Raises HeadwiseError when there is no such layer, head or position, when the text is
    empty or longer than the context, and when ids and tokens differ in number.
    """
    require_text(ids, model.config.context, "the model's context")
    if (dim := model.config.latent_dim) is not None:
        raise HeadwiseError(f"latent_dim={dim}: the steps are those of four matrices; trace a model without a latent")
    if len(tokens) != len(ids):
        raise HeadwiseError(f"{len(tokens)} tokens for {len(ids)} ids; pass one for each")
    _check_place("position", "--at", at, "the text", len(ids))
    _check_place("layer", "--layer", layer, "the model", len(model.blocks))
    seen = _run(model, ids, layer)
    spec, call = seen.layer.spec, seen.call
    # Only now: layers may differ in their heads, and `seen` has this one.
    _check_place("head", "--head", head, f"layer {layer}", spec.n_heads)
    chosen = seen.layer.heads[head]  # its own rows of the weights: `wq` (D,C), `bq` (D,), `wo` (C,E), ...
    if seen.layer.o_proj is None:
        raise HeadwiseError("this layer has no output projection, so no head adds through one; trace a layer with W_O")
    outs = zip(seen.layer.heads, call.out[0, :, at], strict=True)  # with each head what it gives at `at`, (E,)
    # (H,C) What each head adds to the residual stream. The `if` is for the type checker: each has its `wo`.
    added = torch.stack([each.wo @ out for each, out in outs if each.wo is not None])
    q_norm, k_norm, bias = seen.layer.q_norm, seen.layer.k_norm, seen.layer.o_proj.bias
    query = _stages(seen.layer, q_norm, chosen.wq, chosen.bq, seen.normed[at], at, call.q[0, head, at])
    gate = call.options.gate
    return HeadSteps(
        model=name,
        tokens=tuple(tokens),
        layer=layer,
        head=head,
        at=at,
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        kv_head=chosen.kv_index,
        sharing=chosen.shared_with,
        query=query,
        q_gain=None if q_norm is None else _floats(q_norm.weight),
        k_gain=None if k_norm is None else _floats(k_norm.weight),
        norm_eps=None if q_norm is None else q_norm.eps,
        pairs=spec.rope.pairs(spec.head_dim) if spec.rope else (),  # numbers that are rotated together
        **_softmax(seen, head, at, query[-1].values),  # from `scale` to `summed`
        gate=None if gate is None else float(torch.as_tensor(gate)[head]),  # one number for each head
        out=_floats(call.out[0, head, at]),
        wo=_rows(chosen.wo),
        added=_rows(added),
        norms=_floats(added.norm(dim=1)),
        out_bias=None if bias is None else _floats(bias),
        layer_out=_floats(seen.out[at]),
        x=_floats(seen.x[at]),
        x_new=_floats(seen.x_new[at]),
    )


def _check_place(what: str, option: str, number: int, owner: str, count: int) -> None:
    # Refuse a number that none of the owner's `count` places has.
    if not 0 <= number < count:
        last = "0" if count == 1 else f"0 to {count - 1}"
        raise HeadwiseError(f"there is no {what} {number}: {owner} has {count}, counted from 0; pass {option} {last}")


def _run(model: GPT, ids: Sequence[int], number: int) -> _Seen:
    """One run of a copy of the model in float64 on the CPU, noting what happens around one layer."""
    twin = copy.deepcopy(model).to("cpu", torch.float64).eval()
    block = twin.blocks[number]
    assert isinstance(block, Block)  # for the type checker: torch's list of modules says `Module`
    noted = {}  # the fields of `_Seen` by their names, each (T,C)
    calls: list[Call] = []
    # What a module reads is what the step before it gave: the feed-forward's norm reads the stream after the attention.
    for name, module in (("x", block.attention_norm), ("normed", block.attention), ("x_new", block.feed_forward_norm)):
        # `name=name` keeps the name of this turn of the loop; else all hooks would use the last one. `inputs` are
        # the module's arguments: the first is (1,T,C), and [0] takes the only text of the batch.
        module.register_forward_pre_hook(lambda _, inputs, name=name: noted.update({name: inputs[0][0]}))
    block.attention.register_forward_hook(lambda _, inputs, output: noted.update(out=output[0]))
    with observe(block.attention, calls.append):
        twin(torch.tensor([list(ids)]))
    return _Seen(block.attention, calls[0], **noted)


def _stages(
    layer: MultiHeadAttention,
    norm: nn.RMSNorm | None,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    position: int,
    final: Tensor,
) -> tuple[VectorStage, ...]:
    """A query or key (D,) of one position, from its projection to `final`, which the attention was given.

    `x` (C,) is what the layer reads there, `weight` (D,C) and `bias` (D,) project it, `norm` is the qk-norm.
    """
    rope = layer.spec.rope
    projected = weight @ x if bias is None else weight @ x + bias
    stages = [VectorStage("projected", _floats(projected))]
    # Two stages may follow, either of them first; a layer may lack both. In the JSON of `trace` a rotation is "turned".
    is_rotated_first = rope is not None and rope.before_norm
    for kind in ("turned", "normed") if is_rotated_first else ("normed", "turned"):
        before = stages[-1].values
        if kind == "turned" and rope is not None:
            stages.append(_rotated(rope, layer.spec.head_dim, before, position))
        elif kind == "normed" and norm is not None:
            values = torch.tensor(before, dtype=torch.float64)
            rms = math.sqrt(float(values.square().mean()) + layer.spec.qk_norm_eps)  # shown beside the values
            stages.append(VectorStage("normed", _floats(norm(values)), rms=rms))
    # The model's own numbers have the last word: these may differ by rounding, and the scores come of those.
    stages[-1] = replace(stages[-1], values=_floats(final))
    return tuple(stages)


def _rotated(rope: RoPE, head_dim: int, values: tuple[float, ...], position: int) -> VectorStage:
    """Values (D,) rotated by the angles of a position."""
    frequencies, factor = rope.frequencies(head_dim)  # the factor is 1 but for yarn, which scales cosines and sines
    angles = torch.tensor(frequencies, dtype=torch.float64) * position
    # `Rotation` of the tensor rung keeps its table in float32, also in a float64 model. So these are rounded, too,
    # and are the very cosines that it multiplies by.
    cos = _floats((angles.cos() * factor).float())
    sin = _floats((angles.sin() * factor).float())
    result = list(values)
    for m, (a, b) in enumerate(rope.pairs(head_dim)):  # features that no pair has are not rotated
        result[a] = values[a] * cos[m] - values[b] * sin[m]
        result[b] = values[b] * cos[m] + values[a] * sin[m]
    return VectorStage("turned", tuple(result), cos=cos, sin=sin)


def _softmax(seen: _Seen, head: int, at: int, query: tuple[float, ...]) -> dict[str, Any]:
    """The fields of HeadSteps from the scores to the sum of the weighted values; `query` (D,) is the scored one."""
    call, layer = seen.call, seen.layer
    steps = trace(call.q, call.k, call.v, call.options)
    chosen = layer.heads[head]
    # (S,) The row of this query in four records (B,H,T,S), each made of the one before. `masked` are the logits.
    scores, capped, logits, weights = (
        record[0, head, at].tolist() for record in (steps.scores, steps.capped, steps.masked, steps.weights)
    )
    visible = [j for j, logit in enumerate(logits) if logit > -math.inf]  # keys that the mask does not hide
    sink = None if chosen.sink is None else float(chosen.sink)
    if sink == -math.inf or not visible:
        sink = None  # a sink of -inf takes no weight; and a query that sees no key gives 0, whatever its sink
    terms = [logits[j] for j in visible]  # what the softmax runs over: a sink is one extra logit
    if sink is not None:
        terms.append(sink)
    top = max(terms, default=0.0)  # subtracted before exp, as the rungs do, so that nothing overflows
    sink_exp = None if sink is None else math.exp(sink - top)
    keys = []
    for j in visible:
        key = call.k[0, chosen.kv_index, j]
        value = _floats(call.v[0, chosen.kv_index, j])
        stages = _stages(layer, layer.k_norm, chosen.wk, chosen.bk, seen.normed[j], j, key)
        products = tuple(a * b for a, b in zip(query, stages[-1].values, strict=True))
        keys.append(
            KeySteps(
                position=j,
                stages=stages,
                products=products,
                dot=math.fsum(products),  # rounded once, at the end
                score=scores[j],
                capped=capped[j],
                bias=logits[j] - capped[j],  # what the mask adds, such as ALiBi's slope times the distance
                logit=logits[j],
                shifted=logits[j] - top,
                exp=math.exp(logits[j] - top),
                weight=weights[j],
                value=value,
                weighted=tuple(weights[j] * e for e in value),
            )
        )
    total = math.fsum(key.exp for key in keys) + (sink_exp or 0.0)
    return {
        "scale": 1 / math.sqrt(layer.spec.head_dim) if call.options.scale is None else call.options.scale,
        "softcap": call.options.softcap,
        "keys": tuple(keys),
        "top": top,
        "sink": sink,
        "sink_exp": sink_exp,
        "sink_weight": None if sink_exp is None else sink_exp / total,
        "total": total,
        "summed": tuple(math.fsum(key.weighted[e] for key in keys) for e in range(layer.spec.value_dim)),
    }


def _floats(values: Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())


def _rows(matrix: Tensor | None) -> tuple[tuple[float, ...], ...]:
    # None stands only in the type of a head's `wo`.
    return () if matrix is None else tuple(map(_floats, matrix))


def example_model() -> tuple[GPT, Tokens, str]:
    """A model of the preset `microgpt` trained for a second on given names (Anna, ...), its tokenizer, and its name.

    It is the same each time on the same machine. Torch's own random state is left as it was.
    """
    preset = find_preset("microgpt")
    names = read_text(packaged("names")).split()
    tokens = Tokens.characters("".join(names), boundary=True)  # one more token begins and ends each name
    # The held-out text must not be empty, but nothing is measured on it: one name, which stays in the training.
    data = Documents.of_lines(tokens, names, names[:1], preset.shape["context"])
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), one_thread():
        torch.manual_seed(EXAMPLE_SEED)
        model = GPT(GPTConfig(vocab_size=len(tokens), **preset.shape))
        # clip=inf: no gradient is cut, so that the model stays that of earlier versions, which did not clip.
        fit(model, replace(preset.recipe, steps=EXAMPLE_STEPS, clip=math.inf), data, EXAMPLE_SEED)
    return model.eval(), tokens, f"microgpt, {len(names)} names"
