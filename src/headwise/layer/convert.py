"""torch.nn.MultiheadAttention and the courses' class made into layers of ours, each tried against the original.

`from_torch` converts one; `replace` converts all of a model, which is called as before.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.backends.torch_ import trace
from headwise.errors import HeadwiseError
from headwise.layer.layer import MultiHeadAttention
from headwise.layer.projections import shapes_alone
from headwise.masks import Allowed, Bias, Causal, Lengths, Mask, all_of
from headwise.spec import AttentionSpec

# Linears, beside `num_heads` and a causal `mask`
COURSE = ("W_query", "W_key", "W_value", "out_proj")
# what names of theirs begin with -> that of ours; with kdim or vdim torch has q_proj_weight
RENAMED: dict[str, str] = {}
for _ours, _course in zip("qkvo", COURSE, strict=True):
    RENAMED |= {f"{_course}.": f"{_ours}_proj.", f"{_ours}_proj_": f"{_ours}_proj."}
# that both are run on: small, and different primes
N_TEXTS = 3
N_TOKENS = 13
N_KEYS = 11


def from_torch(module: nn.Module) -> MultiHeadAttention:
    """The layer that computes what a module of torch does, with copies of its weights.

        layer = hw.from_torch(nn.MultiheadAttention(96, 6, batch_first=True))
        y = layer(x, mask=hw.Causal())

    Both are run on random texts: in float32 and wider a difference beyond rounding is an error.

    Args:
        module: an nn.MultiheadAttention, or a course's class (Raschka, "Build a Large Language Model (From Scratch)",
            section 3.6): Linears W_query, W_key, W_value and out_proj, num_heads, a causal `mask`. It is left alone.
            The layer takes (batch, tokens, width) in any case, texts of any length, and a mask with each call; with
            kdim or vdim other than embed_dim it is for cross attention alone.

    Raises:
        HeadwiseError: for another module, and with the name of what a layer cannot represent.
    """
    return converted(module)[0]


def converted(module: nn.Module) -> tuple[MultiHeadAttention, float]:
    """`from_torch`, with the largest difference between layer and module."""
    is_stock = isinstance(module, nn.MultiheadAttention)
    kind = type(module).__name__
    n_heads = getattr(module, "num_heads", None)
    is_course = isinstance(getattr(module, "mask", None), Tensor) and all(
        hasattr(module, name) for name in COURSE
    )
    if not isinstance(n_heads, int) or not (is_stock or is_course):
        raise HeadwiseError(
            f"{kind} is not known; from_torch takes nn.MultiheadAttention, and modules with {', '.join(COURSE)}, "
            f"num_heads and a mask. Of others copy the weights into a MultiHeadAttention"
        )
    if (
        getattr(module, "add_zero_attn", False)
        or getattr(module, "bias_k", None) is not None
    ):
        raise HeadwiseError(
            "add_bias_kv and add_zero_attn append a key and value to each text, and a layer has none; build without"
        )
    layer = _layer(module, n_heads, None if is_stock else Causal())
    return layer, _difference(layer, module)


def parts(module: nn.Module) -> dict[str, tuple[Tensor, nn.Parameter]]:
    """By the names of our parameters: the numbers, and the parameter of the module that they lie in."""
    of_module: dict[str, tuple[Tensor, nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        kind = name.removeprefix("in_proj_")
        if kind != name:  # the rows of all three, stacked
            for ours, rows in zip("qkv", parameter.detach().chunk(3), strict=True):
                of_module[f"{ours}_proj.{kind}"] = rows, parameter
            continue
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        of_module[name] = parameter.detach(), parameter
    return of_module


def _layer(module: nn.Module, n_heads: int, mask: Causal | None) -> MultiHeadAttention:
    """The layer with copies of the module's weights."""
    kind = type(module).__name__
    weights = {name: numbers for name, (numbers, _) in parts(module).items()}
    stored = {f"{x.dtype} on {x.device}" for x in weights.values()}
    is_whole = {f"{name}_proj.weight" for name in "qkvo"} <= weights.keys()
    # in one byte there are quantised weights; on the meta device there are none
    is_plain = all(
        x.is_floating_point() and x.dtype.itemsize > 1 and not x.is_meta
        for x in weights.values()
    )
    if not (is_whole and is_plain) or len(stored) > 1:
        raise HeadwiseError(
            f"{kind} has weights in {', '.join(sorted(stored))}; a layer has four projections in floats of one dtype "
            f"on one device: dequantise, unfuse, load or cast them first"
        )
    q, k, v, o = (weights[f"{name}_proj.weight"] for name in "qkvo")
    dropout = getattr(module, "dropout", 0.0)  # an nn.Dropout, or a number
    spec = AttentionSpec(
        d_model=q.shape[1],
        n_heads=n_heads,
        head_dim=len(q) // n_heads,
        value_dim=len(v) // n_heads,
        d_context=k.shape[1],
        d_values=v.shape[1],
        d_out=len(o),
        q_bias="q_proj.bias" in weights,
        kv_bias="k_proj.bias" in weights,
        out_bias="o_proj.bias" in weights,
        mask=mask,
        dropout=getattr(dropout, "p", dropout),
    )
    # parameters that are made in inference mode could never be trained
    with torch.inference_mode(False):
        # else first weights would be drawn, and the caller's random numbers change
        with shapes_alone():
            layer = MultiHeadAttention.from_spec(spec)
        # a plain clone of a transposed matrix would stay transposed, and safetensors writes none such
        for name, x in weights.items():
            weights[name] = x.clone(memory_format=torch.contiguous_format)
        # assigned: a parameter without numbers cannot be written to
        try:
            layer.load_state_dict(weights, assign=True)
        except RuntimeError as error:
            raise HeadwiseError(
                f"{kind} is no layer of {n_heads} heads; merge adapters into the weights first: "
                f"{' '.join(str(error).split())}"
            ) from None
    return layer.train(module.training)


def _difference(layer: MultiHeadAttention, module: Any) -> float:
    """The largest difference of both on random texts in eval mode; HeadwiseError where it is beyond rounding."""
    spec = layer.spec
    like = layer.q_proj.weight
    layer = copy.deepcopy(layer).eval()
    module = copy.deepcopy(module).eval()
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(length: int, width: int) -> Tensor:
        return torch.randn(
            N_TEXTS, length, width, generator=generator, device="cpu"
        ).to(like)

    pairs = []  # (ours, theirs) of each run
    # The original may make tensors of its own: where the weights are.
    with (
        torch.no_grad(),
        torch.device(like.device),
        torch.autocast(like.device.type, enabled=False),
    ):
        # a course's, which takes no mask, and no longer text than its own
        if spec.mask:
            x = drawn(min(N_TOKENS, module.mask.shape[-1]), spec.d_in)
            pairs.append((layer(x), module(x)))
        else:
            module.batch_first = True
            x = drawn(N_TOKENS, spec.d_in)
            keys = drawn(N_KEYS, spec.d_context)
            values = drawn(N_KEYS, spec.d_values)
            # a whole text, a good half, a single key
            lengths = torch.tensor([N_KEYS, N_KEYS // 2 + 1, 1])
            padding = torch.arange(N_KEYS) >= lengths[:, None]
            theirs, _ = module(x, keys, values, key_padding_mask=padding)
            pairs.append((layer(x, keys, values, mask=Lengths(lengths)), theirs))
            if spec.d_in == spec.d_context == spec.d_values:
                later = torch.ones(N_TOKENS, N_TOKENS, dtype=torch.bool).triu(1)
                theirs, _ = module(x, x, x, attn_mask=later)
                pairs.append((layer(x, mask=Causal()), theirs))
    # of all runs; NaN in one stays NaN
    largest = torch.stack([(a - b).abs().max() for a, b in pairs]).max().item()
    reached = torch.stack([theirs.abs().max() for _, theirs in pairs]).max().item()
    # A thousandth of the largest output is a round choice: far above rounding in float32, far below what a wrong rule
    # changes. `not <=` refuses NaN, too.
    if like.dtype.itemsize >= 4 and not largest <= 1e-3 * reached:
        raise HeadwiseError(
            f"the layer differs from the module by {largest:.3g} where outputs reach {reached:.3g}, beyond rounding; "
            f"its forward is not what its weights and name say, so it is not converted"
        )
    return largest


class TorchAttention(nn.Module):
    """A `MultiHeadAttention`, as `.layer`, that is called as nn.MultiheadAttention is and has its attributes.

    A query that may attend to nothing gives 0, with weights of 0; torch gives NaN. Weights are those before dropout.
    """

    # so that nn.TransformerEncoderLayer calls this module, and not a kernel with its weights
    in_proj_bias = None
    # Read before `in_proj_bias` where nn.TransformerEncoder is built of such a layer: without it that fails.
    _qkv_same_embed_dim = False

    def __init__(self, layer: MultiHeadAttention, batch_first: bool) -> None:
        super().__init__()
        self.layer = layer
        self.batch_first = batch_first
        self.embed_dim = layer.spec.d_in
        self.num_heads = layer.spec.n_heads
        self.head_dim = layer.spec.head_dim

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Masks mean what they mean in torch: True may not be attended to, numbers are added to the scores."""
        is_one_document = query.ndim == 2
        tokens_first = not is_one_document and not self.batch_first
        # Self attention by one source, as three would be cross attention to the layer.
        sources = [query] if key is query and value is query else [query, key, value]
        if tokens_first:
            sources = [source.transpose(0, 1) for source in sources]
        out, call = self.layer.attended(
            *sources, mask=self._mask(key_padding_mask, attn_mask, is_causal)
        )
        out = out.transpose(0, 1) if tokens_first else out
        if not need_weights:
            return out, None
        # the steps of the call again, (B,H,T,S)
        maps = trace(call.q, call.k, call.v, call.options).weights
        maps = maps.mean(1) if average_attn_weights else maps
        return out, (maps[0] if is_one_document else maps).to(out.dtype)

    def _mask(
        self, padding: Tensor | None, attn_mask: Tensor | None, is_causal: bool
    ) -> Mask | None:
        masks: list[Mask] = []
        if is_causal:
            # torch counts from the first key, also where there are more keys
            masks.append(Causal(offset=0))
        if attn_mask is not None and attn_mask.ndim == 3:  # (B*H,T,S)
            attn_mask = attn_mask.reshape(-1, self.num_heads, *attn_mask.shape[1:])
        if padding is not None:  # (B,S), or (S,) of one document
            padding = padding[..., None, None, :]
        # in bools of torch True may not be attended to
        for hidden in (attn_mask, padding):
            if hidden is not None:
                masks.append(
                    Allowed(~hidden) if hidden.dtype == torch.bool else Bias(hidden)
                )
        return all_of(masks)


@dataclass(frozen=True)
class Replaced:
    """A copy of a model whose nn.MultiheadAttention are layers of ours.

    Attributes:
        model: the copy; the model that was passed is as it was
        layers: the path of each module that was replaced -> its layer
        differences: and the largest difference between the two on random texts
    """

    model: nn.Module
    layers: dict[str, MultiHeadAttention]
    differences: dict[str, float]

    def __str__(self) -> str:
        worst = max(self.differences.values())
        return f"{len(self.layers)} nn.MultiheadAttention replaced, each within {worst:.2g}: {', '.join(self.layers)}"


def replace(model: nn.Module) -> Replaced:
    """A copy of a model in which a `MultiHeadAttention` answers where an nn.MultiheadAttention did, with certificates.

        done = hw.replace(model)                     # layers, and how far each is from what it replaces
        with hw.watch(done.model) as seen: done.model(src, tgt)

    The call stays: query, key, value, key_padding_mask, attn_mask, need_weights, average_attn_weights, is_causal, with
    batch_first or without. In evaluation nn.TransformerEncoder has a kernel of its own, which is not used any more:
    with padding it gives 0 where the copy gives a number for the padded token.

    Args:
        model: any torch module; it is left alone

    Raises:
        HeadwiseError: with the name of every module that cannot be replaced, and then nothing is.
    """
    layers = {}
    differences = {}
    refused = []
    ours: dict[int, Any] = {}  # by the id of a module what stands for it in the copy
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        path = name or "the model itself"
        try:
            if type(module) is not nn.MultiheadAttention:
                raise HeadwiseError(
                    f"it is a {type(module).__name__}, whose forward may be another"
                )
            kinds = ("forward", "forward_pre", "backward", "backward_pre")
            if any(getattr(module, f"_{kind}_hooks") for kind in kinds):
                raise HeadwiseError(
                    "it has hooks, which would be lost; remove them first"
                )
            layers[path], differences[path] = converted(module)
        except HeadwiseError as error:
            refused.append(f"{path}: {error}")
            continue
        # what is not trained there is not trained here
        for part, (_, parameter) in parts(module).items():
            layers[path].get_parameter(part).requires_grad_(parameter.requires_grad)
        ours[id(module)] = TorchAttention(layers[path], module.batch_first).train(
            module.training
        )
    if refused:
        raise HeadwiseError(
            f"{len(refused)} of {len(refused) + len(layers)} cannot be replaced. {' '.join(refused)}"
        )
    if not layers:
        raise HeadwiseError(
            f"{type(model).__name__} has no nn.MultiheadAttention inside; from_torch takes a course's class"
        )
    # which takes what is in `ours` for a copy that it has made
    copied = copy.deepcopy(model, ours)
    for module in copied.modules():
        if isinstance(module, nn.TransformerEncoder):
            # which hands the weights of its first layer to a kernel
            module.use_nested_tensor = False
    return Replaced(copied, layers, differences)
