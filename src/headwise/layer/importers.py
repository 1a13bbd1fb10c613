"""Attention modules of torch and transformers, and a course's, made into layers, each with a certificate.

    import_attention(module)        recognises the module and calls the right one of these
    from_torch(module)              torch.nn.MultiheadAttention
    from_transformers(module, ...)  attention of transformers, of a family with a record in families.toml
    from_course(module)             W_query, W_key, W_value, out_proj, num_heads and a causal `mask`

A certificate is what the layer and the original were run on, and their largest difference. It takes a copy of the
module, which itself is not touched. Modules are recognised by class name and attributes, so nothing here imports
transformers. What a layer cannot represent is refused by name.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.families import Family, class_names, families, family_of_attention
from headwise.layer.layer import MultiHeadAttention
from headwise.layer.parts import build, check_parameters, linear_weights, named, parameters_of, parts_of
from headwise.masks import Causal, Lengths, Mask, Window
from headwise.positions import RoPE
from headwise.rungs.tensor import trace
from headwise.spec import Options

CAUSAL = Causal()

# Texts of a certificate, tokens of each, and keys of its context: small, and different primes, so that no axis passes
# for another one.
N_TEXTS, N_TOKENS, N_KEYS = 3, 13, 11

# What is imported, as a function: of x (B,T,c), of what keys (B,S,c) and values (B,S,c) are made of, both x in self
# attention, and of what is added to the scores, (B,H,T,S) or None, -inf = forbidden.
Original = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Imported:
    """A layer made of someone else's weights, and how far it is from the original.

    Attributes:
        layer: a MultiHeadAttention with copies of the weights, in their dtype, on their device
        difference: largest absolute difference between the two on random input, in that dtype
        path: the importer and the layout it found
        compared: what was run against what, on which inputs and masks
    """

    layer: MultiHeadAttention
    difference: float
    path: str
    compared: str

    def __repr__(self) -> str:
        spec, what = self.layer.spec, self.compared.partition(" against ")[0]  # `certified` writes it
        return f"Imported({self.path}: {spec!r}, within {self.difference:.2g} of {what})"


def certified(
    layer: MultiHeadAttention,
    original: Original,
    path: str,
    what: str,
    ways: Sequence[str],
    n_tokens: int = N_TOKENS,
    takes_mask: bool = True,
) -> Imported:
    """Run both on random input in eval mode, and hand the layer back with their largest difference.

    `path` and `what` are the importer with its layout and the original, in words. `ways` are "self" and "cross";
    `takes_mask` says whether the original takes a mask per call. In float32 and wider a difference beyond rounding is
    an error; in half precision rounding alone may be large, so there the figure speaks for itself.
    """
    spec, like, mode = layer.spec, layer.q_proj.weight, layer.training
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(length: int, width: int) -> Tensor:
        return torch.randn(N_TEXTS, length, width, generator=generator, device="cpu").to(like)

    layer.eval()  # no dropout; its mode comes back below
    measured = []  # of each run the largest difference, and the largest output
    answered: list[str] = []
    # The original may make tensors of its own, such as angles: where the weights are.
    with torch.no_grad(), torch.device(like.device), torch.autocast(like.device.type, enabled=False):
        for way in ways:
            n_keys = n_tokens if way == "self" else N_KEYS
            x, context, values = drawn(n_tokens, spec.d_in), drawn(n_keys, spec.d_context), drawn(n_keys, spec.d_values)
            keys = x if way == "self" else context  # what they are made of
            # transformers makes keys and values of one sequence; two widths are torch's kdim and vdim alone.
            if way == "self" or spec.d_values == spec.d_context:
                values = keys
            masks: list[Mask | None] = [None]
            if takes_mask and way == "self" and spec.mask is None:  # a layer of its own mask is tried with that
                masks.append(CAUSAL)
            if takes_mask:
                # Of N_TEXTS texts one is whole, one a good half, and one a single key.
                masks.append(Lengths([n_keys, n_keys // 2 + 1, 1]))
            for mask in masks:
                # The original gets the layer's mask and the call's as numbers; the layer joins its own to the call's.
                added = _added(layer.mask_with(mask), like.new_zeros(N_TEXTS, spec.n_heads, n_tokens, n_keys))
                expected = original(x, keys, values, added)
                ours = layer(x, None if way == "self" else keys, None if values is keys else values, mask=mask)
                if added is not None:  # a row that may attend nothing is 0 here, and elsewhere anything
                    # Of (B,H,T,S) to (B,T,1): queries that see some key in every head.
                    rows = (added > -math.inf).any(-1).all(1)[..., None]
                    expected, ours = torch.where(rows, expected, 0), torch.where(rows, ours, 0)
                measured.append(torch.stack([(ours - expected).abs().max(), expected.abs().max()]))
            names = ["no further mask" if mask is None else repr(mask) for mask in masks]
            answered.append(f"{way} attention ({', '.join(names)})")
    layer.train(mode)
    largest, reached = torch.stack(measured).amax(0).tolist()  # of all runs; NaN in one stays NaN
    # A thousandth of the largest output is a round choice: far above rounding in float32, far below what a wrong rule
    # changes. `not <=` refuses NaN, too.
    if like.dtype.itemsize >= 4 and not largest <= 1e-3 * reached:
        raise HeadwiseError(
            f"{path}: the layer differs from {what} by {largest:.3g} where outputs reach {reached:.3g}, beyond "
            f"rounding; its forward is not what its weights and name say, so it is not imported"
        )
    mask_of_layer = "" if spec.mask is None else f", mask {spec.mask!r}"
    compared = (
        f"{what} against the layer{mask_of_layer}: {', '.join(answered)}; {N_TEXTS} texts of {n_tokens} tokens, "
        f"{str(like.dtype).removeprefix('torch.')} on {like.device.type}, eval"
    )
    return Imported(layer, largest, path, compared)


def _added(mask: Mask | None, zeros: Tensor) -> Tensor | None:
    """A mask as numbers to add to the scores (B,H,T,S), -inf = forbidden, in float32 or wider."""
    if mask is None:
        return None
    # Queries and keys of width 1 that are all 0, cut out of `zeros`: (B,H,T,1) and (B,H,S,1).
    keys = zeros.transpose(2, 3)[..., :1]
    return trace(zeros[..., :1], keys, keys, Options(mask)).masked  # of scores that are 0


COURSE = ("W_query", "W_key", "W_value", "out_proj", "num_heads")  # the first four are Linears


def import_attention(module: nn.Module) -> Imported:
    """A layer that computes what `module` does, with its certificate.

    Args:
        module: an attention of torch, transformers or a course

    Raises:
        HeadwiseError: for a module not known.
    """
    if isinstance(module, nn.MultiheadAttention):
        return from_torch(module)
    family = family_of_attention(module)
    if family is not None:
        return from_transformers(module, family)
    if all(hasattr(module, name) for name in COURSE):
        return from_course(module)
    if isinstance(module, MultiHeadAttention):
        raise HeadwiseError("this is a headwise layer already; use copy.deepcopy for another one")
    if isinstance(getattr(module, "heads", None), nn.ModuleList):
        raise HeadwiseError(
            f"{type(module).__name__} stacks single heads; headwise.courses.from_scratch.class_from_wrapper makes of "
            f"the courses' wrapper one layer, which import_attention takes"
        )
    known = ", ".join(other.whole for other in families("import").values())
    raise HeadwiseError(
        f"{type(module).__name__} is not known; import_attention knows nn.MultiheadAttention, transformers' {known}, "
        f"and modules with {', '.join(COURSE)} and a mask. Of others copy the weights into a MultiHeadAttention"
    )


def from_torch(module: nn.MultiheadAttention) -> Imported:
    """From torch.nn.MultiheadAttention, with packed or separate weights, batch_first or not.

    The layer is batch-first in any case. With kdim or vdim other than embed_dim it is for cross attention alone.
    Masks are passed per call, as there. Refused: add_bias_kv, add_zero_attn.
    """
    if module.bias_k is not None or module.bias_v is not None:
        raise HeadwiseError(
            "add_bias_kv=True appends a learned key and value to each text, and a headwise layer has none; "
            "build the module with add_bias_kv=False"
        )
    if module.add_zero_attn:  # not built like that here: a sink of ours learns, and torch's stays 0
        raise HeadwiseError(
            "add_zero_attn=True appends a key and value of zeros to each text; that is a sink logit of 0: "
            "copy the weights into MultiHeadAttention(sink=True) yourself"
        )
    # With kdim or vdim torch keeps three matrices, else a single one, in which their rows are stacked. The biases of
    # all three are stacked either way.
    separate = [f"{name}_proj_weight" for name in "qkv"]
    check_parameters(module, {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias", *separate})
    packed, bias, n_heads = module.in_proj_weight, module.in_proj_bias, module.num_heads
    matrices = [getattr(module, name) for name in separate] if packed is None else packed.chunk(3)
    q, k, v = zip(matrices, (None,) * 3 if bias is None else bias.chunk(3), strict=True)
    weights = named(q_proj=q, k_proj=k, v_proj=v, o_proj=linear_weights(module.out_proj, "out_proj"))
    layer = build(weights, n_heads, dropout=module.dropout, training=module.training)
    twin = copy.deepcopy(module).eval()

    def original(x: Tensor, keys: Tensor, values: Tensor, added: Tensor | None) -> Tensor:
        # Of 0 and -inf; torch takes it as (B*H,T,S), True = may NOT attend.
        blocked = None if added is None else (added == -math.inf).flatten(0, 1)
        if not twin.batch_first:
            x, keys, values = (sequence.transpose(0, 1) for sequence in (x, keys, values))
        out: Tensor = twin(x, keys, values, attn_mask=blocked, need_weights=False)[0]
        return out if twin.batch_first else out.transpose(0, 1)

    layout = "separate q, k, v_proj_weight" if packed is None else "packed in_proj_weight"
    only_cross = module.kdim != module.embed_dim or module.vdim != module.embed_dim
    ways = ("cross",) if only_cross else ("self", "cross")
    return certified(layer, original, f"from_torch, {layout}", "nn.MultiheadAttention", ways)


def from_course(module: nn.Module) -> Imported:
    """From the class that courses build: Linears W_query, W_key, W_value, out_proj, num_heads, a causal `mask`.

    Raschka, "Build a Large Language Model (From Scratch)", section 3.6. forward(x) (B,T,d_in) -> (B,T,d_out), heads
    are adjacent slices of the width, `mask` (context_length, context_length) is 1 where a query may not look. The
    layer has no context_length: it takes texts of any length. `dropout`, where there is one, is on the weights: an
    nn.Dropout, or a number.
    """
    attention: Any = module
    wanted = {name: getattr(module, name, None) for name in (*COURSE, "mask")}
    # Linears, the number of heads, and the mask as a tensor; anything else under these names counts as not there.
    absent = [name for name, part in wanted.items() if not isinstance(part, nn.Module | Tensor | int)]
    if absent:
        raise HeadwiseError(
            f"{type(module).__name__} has no {', '.join(absent)}; the course's class has {', '.join(COURSE)} and a "
            f"mask. Of others copy the weights into a MultiHeadAttention"
        )
    check_parameters(module, {f"{name}.{kind}" for name in COURSE[:4] for kind in ("weight", "bias")})
    q, k, v, o = (linear_weights(getattr(module, name), f"{type(module).__name__}.{name}") for name in COURSE[:4])
    dropout = getattr(module, "dropout", 0.0)
    layer = build(
        named(q_proj=q, k_proj=k, v_proj=v, o_proj=o),
        attention.num_heads,
        mask=CAUSAL,
        dropout=getattr(dropout, "p", dropout),
        training=module.training,
    )
    twin = copy.deepcopy(module).eval()
    n_tokens = min(N_TOKENS, attention.mask.shape[-1])  # it takes no longer text than its mask

    def original(x: Tensor, keys: Tensor, values: Tensor, added: Tensor | None) -> Tensor:
        out: Tensor = twin(x)  # which takes no mask: its own buffer must be what the layer's Causal is
        return out

    return certified(layer, original, "from_course", type(module).__name__, ("self",), n_tokens, takes_mask=False)


def from_transformers(module: nn.Module, family: Family) -> Imported:
    """From an attention module of transformers, of a known family: Llama, Mistral, Qwen, Gemma, GPT-2, BERT, ...

    Biases, grouped heads, qk-norm, scale, softcap, sliding window and dropout of the weights are taken as they are
    found; rope from `config.rope_parameters`: default, linear, yarn. The model's own rotary embedding makes the angles
    of the certificate. Its angles are rounded to float32, ours are exact, so in float64 the difference is about 1e-7.
    A module for cross attention becomes a layer without mask, to be called with context=. Of BERT's attention the part
    without W_O (BertSelfAttention) becomes a layer without output projection.
    """
    # The module is all of the attention, with W_O, or only the part that computes the heads; then `whole` is None.
    whole = module if family.whole in class_names(module) else None
    core = module if whole is None else whole.get_submodule(family.core)
    w_o = None if whole is None else whole.get_submodule(family.o)
    cross = family.is_cross(core)
    check_parameters(core, parameters_of(family))
    rope, weights = _rope(core, family), parts_of(family, core, w_o)
    n_heads, scale = family.read(core, family.n_heads), float(family.read(core, family.scale))
    head_dim = len(weights["q_proj.weight"]) // n_heads
    # 1/sqrt(d), but for the rounding of a float of Python: then the layer's scale stays None.
    usual = math.isclose(scale, head_dim**-0.5, rel_tol=1e-12)
    layer = build(
        weights,
        n_heads,
        family.read(core, family.n_kv_heads),
        mask=None if cross else _mask(core, family),
        rope=rope,
        qk_norm_eps=_norm_eps(core, family),
        scale=None if usual else scale,
        softcap=family.read(core, family.softcap),
        dropout=family.read(core, family.dropout),
        training=module.training,
    )
    # W_O where it stands beside the core; None where the core multiplies with it itself, or there is none.
    w_o_beside = None if core is whole else w_o
    what = " and ".join(type(part).__name__ for part in (core, w_o_beside) if part is not None)
    way = "cross" if cross else "self"
    path = f"from_transformers, {family.name}, {way} attention"
    if rope is not None:
        path += f", {rope.scaling or 'default'} rope"
    return certified(layer, _original(core, family, w_o_beside), path, what, (way,))


def _original(core: nn.Module, family: Family, w_o: nn.Module | None) -> Original:
    """A call of a copy of the module, in eval mode, with its own file's attention, which takes any mask."""
    twin: Any = copy.deepcopy(core).eval()
    twin.config._attn_implementation = "eager"  # transformers' name for it; the config is a copy, too
    project = copy.deepcopy(w_o)
    rotary = _rotary(core, family) if family.rope else None
    cross = family.is_cross(core)

    def original(x: Tensor, keys: Tensor, values: Tensor, added: Tensor | None) -> Tensor:
        # Its mask is in the dtype of its scores, with the lowest number instead of -inf. With this flag GPT-2
        # computes scores in float32.
        dtype = torch.float32 if getattr(twin, "reorder_and_upcast_attn", False) else x.dtype
        mask = None if added is None else added.clamp(min=torch.finfo(dtype).min).to(dtype)
        keywords: dict[str, Any] = {family.cross_mask if cross else "attention_mask": mask}
        if cross:
            keywords["encoder_hidden_states"] = keys
        if rotary is not None:
            places = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
            kinds = [twin.layer_type] if hasattr(rotary, "layer_types") else []  # Gemma 3 has angles for each type
            keywords["position_embeddings"] = rotary(x, places, *kinds)
        out: Tensor = twin(x, **keywords)[0]
        return out if project is None else project(out)

    return original


def _mask(core: Any, family: Family) -> Mask | None:
    """Causal, or the window that the model's own mask function would draw; None for an encoder."""
    window = family.read(core, family.window)
    # Not causal: no flag of the module says so, or the config takes it back.
    if not any(family.read(core, path) for path in family.causal) or not getattr(core.config, "is_causal", True):
        if window is not None:
            raise HeadwiseError(
                f"{type(core).__name__} is not causal and has a window of {window}; its mask is not known"
            )
        return None
    return CAUSAL if window is None else Window(window - 1, 0)  # transformers counts the query itself


def _norm_eps(core: nn.Module, family: Family) -> float:
    """The eps of its qk-norm; without one the spec's default, which nothing reads."""
    eps = set()
    for norm in (family.read(core, family.q_norm), family.read(core, family.k_norm)):
        if norm is not None:
            eps.add(float(getattr(norm, "variance_epsilon", None) or norm.eps))  # its two names in transformers
    if len(eps) > 1:
        raise HeadwiseError(f"the norms of queries and keys have eps {sorted(eps)}; a headwise layer has one for both")
    return eps.pop() if eps else 1e-6


def _rope(core: Any, family: Family) -> RoPE | None:
    """The RoPE of a module's config, held against the frequencies of the model's own rotary embedding."""
    if not family.rope:
        return None
    parameters = core.config.rope_parameters
    kind = getattr(core, "layer_type", None)
    parameters = parameters.get(kind, parameters)  # of Gemma 3, whose layers with a window have angles of their own
    scaling = parameters.get("rope_type")
    if scaling not in ("default", "linear", "yarn"):
        raise HeadwiseError(f"rope_type={scaling!r} cannot be represented; headwise.RoPE has default, linear and yarn")
    width, pairs = family.read(core, family.rope_width), family.interleaved
    interleaved = bool(family.read(core, pairs) if isinstance(pairs, str) else pairs)
    # The fields of RoPE by their names in `rope_parameters`; those that are not there keep the defaults of RoPE.
    fields: dict[str, Any] = {"theta": parameters["rope_theta"], "interleaved": interleaved}
    if scaling != "default":
        fields |= {"scaling": scaling, "factor": parameters["factor"]}
    if scaling == "yarn":
        fields |= {"original_context": parameters["original_max_position_embeddings"]}
        fields |= {name: parameters[name] for name in ("beta_fast", "beta_slow") if parameters.get(name)}
    if parameters.get("partial_rotary_factor", 1) != 1:
        fields["dim"] = int(width * parameters["partial_rotary_factor"])
    rope = RoPE(**fields)
    frequencies, our_factor = rope.frequencies(width)
    rotary = _rotary(core, family)
    prefix = f"{kind}_" if hasattr(rotary, f"{kind}_inv_freq") else ""  # Gemma 3 has a set for each type of layer
    ours = torch.tensor(frequencies, dtype=torch.float64)
    theirs = getattr(rotary, f"{prefix}inv_freq").double().cpu()
    # Theirs are computed in float32, a power of theta among them: some 1e-6 apart. A field that is not read moves more.
    if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=1e-5, atol=0):
        raise HeadwiseError(
            f"rope_parameters={parameters} make other frequencies than {rope}; a field has no counterpart"
        )
    # What cos and sin are multiplied by. Theirs is a float of Python, by the formula that ours goes by, or a number
    # from the config with its few digits; where they differ by more, the layer takes theirs.
    factor = float(getattr(rotary, f"{prefix}attention_scaling"))
    return rope if math.isclose(factor, our_factor, rel_tol=1e-6) else replace(rope, attention_factor=factor)


def _rotary(core: Any, family: Family) -> Any:
    """The rotary embedding that stands beside the attention in the model's source, built from the same config."""
    name = f"{family.prefix}RotaryEmbedding"
    for base in type(core).__mro__:  # a subclass may stand in a file of its own, without the embedding
        beside = vars(sys.modules[base.__module__])
        if name in beside:
            with torch.device(next(core.parameters()).device):
                return beside[name](core.config)
    raise HeadwiseError(f"{type(core).__name__} has no {name} beside it, so its angles are unknown")
