"""The arithmetic of one head at one position, number by number; and a small model to show it on.

The model is copied to double precision and run once on the text. `observe` hands over what the layer's attention was
given, and `heard` what it and the norms around it read and give. `trace` gives the steps from scores to weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headwise.backends.torch_ import trace
from headwise.corpus.tokens import Tokens
from headwise.corpus.training import Documents
from headwise.errors import HeadwiseError
from headwise.files import packaged, read_text
from headwise.gpt.gpt import GPT, Block, GPTConfig
from headwise.gpt.presets import find_preset
from headwise.gpt.train import fit, one_thread
from headwise.heads.attribute import heard
from headwise.heads.watch import require_text
from headwise.models.hook import observe
from headwise.records import Call, HeadSteps, KeySteps

# updates that `example_model` is trained for: about a second; more would make a better model
EXAMPLE_STEPS = 200
EXAMPLE_SEED = 0  # of its weights and batches


@torch.no_grad()
def head_steps(
    model: GPT,
    ids: Sequence[int],
    tokens: Sequence[str],
    layer: int,
    head: int,
    at: int,
    name: str,
) -> HeadSteps:
    """Every step of head `head` of layer `layer` at position `at` of the ids (T,).

    `tokens` are the ids as text, one by one, and `name` is what a reader calls the model.

    Vaswani et al. 2017 (arXiv 1706.03762), section 3.2; W_O as a sum over heads: Elhage et al. 2021, "A Mathematical
    Framework for Transformer Circuits". Computed in float64 on a copy; the model is left as it is, and its own numbers
    agree to its own precision. Raises HeadwiseError when there is no such layer, head or position, and when the text
    is empty or longer than the context.
    """
    require_text(ids, model.config.context, "the model's context")
    _check_place("position", at, "the text", len(ids))
    _check_place("layer", layer, "the model", len(model.blocks))
    # A copy in float64 on the CPU: its block, the call of its attention, the stream around it.
    twin = copy.deepcopy(model).to("cpu", torch.float64).eval()
    block, calls = twin.blocks[layer], list[Call]()
    # for the type checker: torch's list of modules says `Module`
    assert isinstance(block, Block)
    parts = block.attention_norm, block.attention, block.feed_forward_norm
    with (
        observe(block.attention, calls.append),
        heard(parts, lambda x: x[0, at]) as rows,
    ):
        twin(torch.tensor([list(ids)]))
    # What a module reads is what the step before it gave: the feed-forward's norm reads the stream after the attention.
    before, attention, after = (rows[part] for part in parts)
    (call,) = calls
    spec, heads, options = block.attention.spec, block.attention.heads, call.options
    # Only now: layers may differ in their heads.
    _check_place("head", head, f"layer {layer}", spec.n_heads)
    if block.attention.o_proj is None:
        raise HeadwiseError(
            "this layer has no output projection, so no head adds through one; trace a layer with W_O"
        )
    chosen, bias = heads[head], block.attention.o_proj.bias
    # (H,C) What each head adds to the residual stream. The `if` is for the type checker: each has its `wo`.
    outs = zip(heads, call.out[0, :, at], strict=True)
    added = torch.stack([each.wo @ out for each, out in outs if each.wo is not None])
    scale = 1 / math.sqrt(spec.head_dim) if options.scale is None else options.scale
    query, keys = _floats(call.q[0, head, at]), _keys(call, head, chosen.kv_index, at)
    # A sink of -inf takes no weight; and a query that sees no key gives 0, whatever its sink.
    sink = None if chosen.sink is None else float(chosen.sink)
    if sink == -math.inf or not keys:
        sink = None
    gate = options.gate  # one number for each head
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
        scale=scale,
        softcap=options.softcap,
        keys=keys,
        sink=sink,
        sink_weight=None if sink is None else 1 - math.fsum(key.weight for key in keys),
        gate=None if gate is None else float(torch.as_tensor(gate)[head]),
        out=_floats(call.out[0, head, at]),
        added=tuple(map(_floats, added)),
        norms=_floats(added.norm(dim=1)),
        out_bias=None if bias is None else _floats(bias),
        x=_floats(before.read),
        layer_out=_floats(attention.gave),
        x_new=_floats(after.read),
    )


def _keys(call: Call, head: int, kv_head: int, at: int) -> tuple[KeySteps, ...]:
    """The keys that the mask does not hide from the query."""
    steps = trace(call.q, call.k, call.v, call.options)
    query = call.q[0, head, at].tolist()
    # (S,4) The row of this query in four records (B,H,T,S), each made of the one before. `masked` are the logits.
    records = steps.scores, steps.capped, steps.masked, steps.weights
    rows = torch.stack([record[0, head, at] for record in records], -1)
    keys = []
    for position, (score, capped, logit, weight) in enumerate(rows.tolist()):
        if logit > -math.inf:
            key, value = (_floats(x[0, kv_head, position]) for x in (call.k, call.v))
            dot = math.fsum(a * b for a, b in zip(query, key, strict=True))
            numbers = dot, score, capped, logit - capped, logit, weight
            keys.append(KeySteps(position, key, value, *numbers))
    return tuple(keys)


def _check_place(name: str, number: int, owner: str, count: int) -> None:
    # Refuse a number that none of the owner's `count` places has.
    if not 0 <= number < count:
        raise HeadwiseError(
            f"there is no {name} {number}: {owner} has {count}, counted from 0"
        )


def _floats(values: Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())


def example_model() -> tuple[GPT, Tokens, str]:
    """A model of the preset `microgpt` trained for a second on given names (Anna, ...), its tokenizer, and its name.

    It is the same each time on the same machine. Torch's own random state is left as it was.
    """
    preset = find_preset("microgpt")
    names = read_text(packaged("data/names.txt")).split()
    # one more token begins and ends each name
    tokens = Tokens.characters("".join(names), boundary=True)
    # The held-out text must not be empty, but nothing is measured on it: one name, which stays in the training.
    data = Documents(tokens, names, names[:1], preset.shape["context"])
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), one_thread():
        torch.manual_seed(EXAMPLE_SEED)
        model = GPT(GPTConfig(vocab_size=len(tokens), **preset.shape))
        # clip=inf: no gradient is cut, so that the model stays that of earlier versions, which did not clip.
        recipe = replace(preset.recipe, steps=EXAMPLE_STEPS, clip=math.inf)
        fit(model, recipe, data, EXAMPLE_SEED)
    return model.eval(), tokens, f"microgpt, {len(names)} names"
