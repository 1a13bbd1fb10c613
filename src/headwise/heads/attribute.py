"""Direct attribution: what each part of a model adds to a logit, with the last norm held as it was.

A logit is a product of the last hidden state with a row of W_U, and that state is a sum: of the embedding, of what each
head wrote through its part of W_O, of what each feed-forward wrote, and of biases. So the logit is a sum over the same
parts (Elhage et al. 2021, "A mathematical framework for transformer circuits"; Wang et al. 2022, arXiv 2211.00593,
appendix on direct effects). What a head writes is in turn a sum over the tokens that it looks at.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads.blocks import row_weights
from headwise.heads.patch import Compared, HeadNumbers, Reading, frame_by
from headwise.heads.table import Row
from headwise.models.ask import ROWS, evaluating, output_matrix, require_next
from headwise.models.hook import hooked
from headwise.models.open import row_of
from headwise.models.sites import Layer, as_rows, layers_of, require_held
from headwise.records import Call
from headwise.spec import resolve_kv_index

if TYPE_CHECKING:
    from pandas import DataFrame

Float64Array = NDArray[np.float64]


class State(NamedTuple):
    """What a module read and gave."""

    read: Tensor
    gave: Tensor


States = dict[nn.Module, State]

# How far, relative to their size, our numbers may lie from the model's where it computes in float32 or wider.
# Rounding puts them apart by far less, a part that is forgotten by far more.
CLOSE = 1e-4


@dataclass(frozen=True, repr=False)
class Attribution(HeadNumbers):
    """What each part of a model adds to the logit of a token, or to the difference of two logits, at one position."""

    # the token, or the token and the one that its logit is compared with
    target: tuple[int, ...]
    position: int  # of the token whose next one is predicted
    heads: dict[str, float]  # what each adds to the logit
    feed_forwards: dict[str, float]  # by layer, "L0"
    mixers: dict[str, float]  # by layer, what one without attention adds: a delta net
    embedding: float  # of the token at the position, and of the position itself
    bias: float  # of W_O, of norms, and of the output matrix
    logit: float  # what the model says, before a softcap of its logits
    # head -> (S,): what it adds by looking at each token; the sum is the head's
    tokens: dict[str, Float64Array]
    weights: dict[str, Float64Array]  # head -> (S,): how much it looks at each

    @property
    def parts(self) -> dict[str, dict[str, float]]:
        """All that adds to the logit, by its kind."""
        rest = {"embedding": self.embedding, "bias": self.bias}
        kinds = {"head": self.heads, "feed_forward": self.feed_forwards}
        return kinds | {"mixer": self.mixers, "rest": rest}

    @property
    def total(self) -> float:
        """The sum of all parts: the logit, but for rounding."""
        return math.fsum(x for parts in self.parts.values() for x in parts.values())

    def to_frame(self, by: str = "part") -> DataFrame:
        """The parts as a pandas DataFrame.

        by  "part": a row for each head, feed-forward and other part; "token": a row for each head and token, with
            what the head adds by looking there, and its weight
        """
        parts: list[Row] = []
        for kind, of_kind in self.parts.items():
            for name, adds in of_kind.items():
                parts.append({"part": name, "kind": kind, "adds": adds})
        tokens: list[Row] = []
        for name, adds_s in self.tokens.items():
            looks = zip(adds_s, self.weights[name], strict=True)
            for t, (adds, weight) in enumerate(looks):
                row = {"head": name, "position": t, "adds": adds, "weight": weight}
                tokens.append(row)
        return frame_by(by, {"part": parts, "token": tokens})

    def _shown(self) -> tuple[Mapping[str, Any], str]:
        return self.heads, "added to the logit"


@torch.no_grad()
def attribute(
    model: nn.Module,
    ids: Any,
    target: int | str | Sequence[int | str],
    position: int = -1,
) -> Attribution:
    """What each head, feed-forward, the embedding and the biases add to a logit; the parts sum to it.

    The last norm, and norms between W_O and the residual stream, are held at what they divided by in this run.

    Args:
        model: a GPT of ours, or a model of transformers that predicts the next token
        ids: (T,) or (1,T); or, where the tokenizer is known, a text
        target: a token, or two: the logit of the first minus that of the second. A token is its id, or, as it
            stands in a text, its word: " Mary"
        position: whose next token is predicted; -1 is the last

    Raises:
        HeadwiseError: where the parts do not sum to the logit: a model whose way of adding them up is not known
            is refused.
    """
    require_next(model)
    row = row_of(model, ids)
    T = row.shape[1]
    if not -T <= position < T:
        raise HeadwiseError(f"position={position} is not among the {T} tokens")
    position %= T  # -1 becomes T - 1
    if callable(target):
        raise HeadwiseError("target is a function; pass one token, or two")
    words = [target] if isinstance(target, int | str) else list(target)
    if len(words) not in (1, 2):
        raise HeadwiseError(
            f"target has {len(words)} tokens; pass one, or two whose logits are compared"
        )
    compared = Compared.of(model, words)
    layers = layers_of(model)
    with evaluating(model), recorded(model, layers) as rows:
        # The text is cut behind the position, which so becomes the last one: what comes later changes nothing here.
        text = Reading(model, layers, row[0, : position + 1])
    return added(text, rows, compared, position)


def added(text: Reading, rows: States, target: Compared, position: int) -> Attribution:
    """What each part of a model adds to a logit. Raises HeadwiseError where the parts do not sum to it.

    A logit is direction . x, x being the last hidden state. `direction` (C,) says what the logit reads: of the last
    hidden state it is a row of W_U. Taken back through the last norm, it is what the logit reads of the residual
    stream, and so of all that parts have written there. Whatever is constant on the way goes to the bias.

    Args:
        text: up to the position, that of its last token
        rows: what modules read and gave while the text was read
        target: the token, or the token and the one that its logit is compared with
    """
    model, kind = text.model, type(text.model).__name__
    require_held(model, "what each part adds")
    # CLOSE for this pass: in a coarse number format it is the spacing of its numbers, 2^-7 of bfloat16.
    spacings = [torch.finfo(call.out.dtype).eps for call in text.calls.values()]
    close = max(CLOSE, *spacings)
    direction, offset = _unembedding(model, target)
    # layers of pictures may not run
    layers = [layer for name, layer in text.layers.items() if name in text.calls]
    ran = {layer.block: layer for layer in layers}
    names = _stacked(model, layers)
    chain = _chain(kind, rows, names, ran, len(direction))
    # (C,) the residual stream behind the last layer, and what the output matrix reads
    normed = last = rows[chain[-1]].gave
    # The norm is the last module that read it; W_U reads it, too, and gives other numbers. A model may have none.
    reading = [module for module, row in rows.items() if row.read.equal(last)]
    norms = [module for module in reading if rows[module].gave.shape == last.shape]
    if norms:
        normed = rows[norms[-1]].gave
    scale = _logit_scale(model, normed, text.answer.cpu().double(), close)
    direction, bias = scale * direction, scale * offset
    logit = float(direction @ normed) + bias
    # Products that sum to the logit, or to a part of it. The model has rounded a factor of each.
    rounded = [direction * normed]
    for norm in norms[-1:]:
        direction, constant = _back(norm, rows[norm], direction)
        bias += constant
    heads: dict[str, float] = {}
    feed_forwards: dict[str, float] = {}
    mixers: dict[str, float] = {}
    tokens: dict[str, Float64Array] = {}
    weights: dict[str, Float64Array] = {}
    for block in chain:
        change = rows[block].gave - rows[block].read
        if block not in ran:
            mixers[names[block]] = float(direction @ change)
            continue
        layer = ran[block]
        at_w_o, wrote, constant = _way_of(kind, layer, rows, close, direction, rounded)
        bias += constant
        parts = _heads_of(text.calls[layer.site.name], layer, rows, at_w_o)
        for name, share, by_token, looks in zip(layer.site.heads, *parts, strict=True):
            heads[name] = float(share)
            tokens[name], weights[name] = by_token.numpy(), looks.numpy()
        # The feed-forward gets what is left of the layer, whatever that is. So the sum cannot be wrong by it: the test
        # below says whether heads, norms and biases are right, and nothing of the feed-forwards.
        feed_forwards[layer.site.name] = float(direction @ (change - wrote))
    # of the token and of its position
    embedding = float(direction @ rows[chain[0]].read)
    of_kinds = heads, feed_forwards, mixers
    ends = embedding, bias, logit
    whole = Attribution(target.tokens, position, *of_kinds, *ends, tokens, weights)
    # Each product in `rounded` may be off by `close` of its size. Roundings fall to either side and partly cancel:
    # those of many numbers add up as a norm does, not as a sum. Twice that is allowed, a round margin.
    rounding = 2 * close * float(torch.cat(rounded).norm())
    # The 1.0 is for a logit near 0, which is a difference of large parts.
    if abs(whole.total - logit) > CLOSE * max(abs(logit), 1.0) + rounding:
        remedy = ""
        if any(list(layer.projection.children()) for layer in layers):
            remedy = "; merge the adapter of its output projections first"
        raise HeadwiseError(
            f"{kind}: the parts sum to {whole.total:.6g}, the logit is {logit:.6g}: "
            f"what its layers add up is not known well enough{remedy}"
        )
    return whole


def _chain(
    kind: str,
    rows: States,
    names: Mapping[nn.Module, str],
    blocks: Iterable[nn.Module],
    C: int,
) -> list[nn.Module]:
    """The layers in the order in which they ran, with those that have no attention; all of one stream of C numbers."""
    chain = [module for module in rows if module in names]
    for block in [*chain, *blocks]:
        sizes = [len(state) for state in rows.get(block, ())]
        if sizes != [C, C]:
            raise HeadwiseError(
                f"{names.get(block, 'a layer')} of {kind} reads and gives {sizes} numbers a token, and its output "
                f"matrix reads {C}: what its parts add is not known, as of several streams; patch the heads"
            )
    return chain


def _unembedding(model: nn.Module, target: Compared) -> tuple[Tensor, float]:
    """What a logit reads of the last hidden state, (C,), and its bias; of two the differences."""
    matrix, bias = output_matrix(model)
    target.check(len(matrix))
    # of each token its part in the difference of two means
    signs = [1 / len(target.answer)] * len(target.answer)
    for _ in target.other:
        signs.append(-1 / len(target.other))
    weights, tokens = torch.tensor(signs, dtype=torch.float64), list(target.tokens)
    offset = 0.0 if bias is None else float(weights @ bias[tokens].cpu().double())
    return weights @ matrix[tokens].cpu().double(), offset


def _logit_scale(
    model: nn.Module, normed: Tensor, logits: Tensor, close: float
) -> float:
    """The factor that the model puts on its logits after W_U, 1.0 in most; with a softcap on them it is 1.0, too.

    `normed` (C,) is what W_U reads, `logits` (V,) what the model says. Raises HeadwiseError where neither a factor nor
    a softcap explains the logits.
    """
    matrix, bias = output_matrix(model)
    # Some thousand tokens tell it; a float32 copy of a large vocabulary's matrix is not made.
    some = matrix[:ROWS]
    wide = torch.promote_types(some.dtype, torch.float32)
    raw = (some.to(wide) @ normed.to(some.device, wide)).cpu().double()
    if bias is not None:
        raw = raw + bias[:ROWS].cpu().double()
    logits = logits[:ROWS]
    # the factor that fits best, by least squares; the clamp keeps 0 / 0 from being NaN
    scale = float(logits @ raw / (raw @ raw).clamp(min=1e-30))
    if _apart(scale * raw, logits) <= close:
        # Most models have no factor: then what is left beside 1 is rounding.
        return 1.0 if abs(scale - 1) <= close else scale
    # A softcap: of Gemma 2 the config has it, models of one's own take one of the others.
    told = getattr(getattr(model, "config", None), "final_logit_softcapping", None)
    for cap in filter(None, (told, 15.0, 20.0, 30.0, 50.0)):
        if _apart(cap * torch.tanh(raw / cap), logits) <= close:
            return 1.0  # then the logit that is explained is the one before the softcap
    raise HeadwiseError(
        f"{type(model).__name__} makes its logits in a way that is not known: its output matrix gives "
        f"{float(raw.max()):.4g} at most, the model says {float(logits.max()):.4g}"
    )


def _way_of(
    kind: str,
    layer: Layer,
    rows: States,
    close: float,
    direction: Tensor,
    rounded: list[Tensor],
) -> tuple[Tensor, Tensor, float]:
    """How what W_O of a layer gives comes into the residual stream: as it is, or through a norm after it.

    What the logit reads of W_O's output (C,), of which it reads `direction` in the stream; what the attention adds to
    the stream (C,); the constant on the way. Products that the model has rounded are added to `rounded`. Raises
    HeadwiseError where the rest of the layer does not go on with the stream that this makes.
    """
    children = [child for child in layer.block.children() if child in rows]
    w_o = layer.projection
    # Granite has a factor, and no norm after W_O.
    writer, factor = w_o, getattr(layer.block, "residual_multiplier", 1.0)
    for child in children:
        read, gave = rows[child]
        # What reads W_O's output and gives it back as it is, a dropout for instance, is no norm.
        if read.equal(rows[w_o].gave) and not read.equal(gave):
            writer, factor = child, 1.0
    wrote = factor * rows[writer].gave
    state = rows[layer.block].read + wrote
    # Either a child reads the stream, as the norm of a feed-forward does; or what a child gives is added to it and
    # makes the layer's output, as of a feed-forward that runs beside the attention.
    # Without a feed-forward the state is the layer's output. Of a mixer beside the attention (Falcon H1) the same.
    known, states = [rows[layer.block].gave], [state]
    for child in children:
        known.append(rows[child].read)
        if rows[child].gave.shape == state.shape:
            states.append(state + rows[child].gave)
    pairs = itertools.product(known, states)
    if not any(x.shape == y.shape and _apart(x, y) <= close for x, y in pairs):
        raise HeadwiseError(
            f"{kind}: it is not known how the attention of {layer.site.name} enters the residual stream; patch the "
            f"heads"
        )
    at_w_o, constant = factor * direction, 0.0
    rounded.append(direction * wrote)
    if writer is not w_o:
        at_w_o, constant = _back(writer, rows[writer], at_w_o)
        rounded.append(at_w_o * rows[w_o].gave)
    bias = getattr(w_o, "bias", None)
    if bias is not None:  # it belongs to no head
        constant += float(at_w_o @ bias.cpu().double())
    return at_w_o, wrote, constant


def _heads_of(
    call: Call, layer: Layer, rows: States, at_w_o: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What each head adds, (H,); what it adds for each token that it looks at, and its weight there, (H,S) each.

    `at_w_o` (C,) is what the logit reads of the output of W_O; all of it at the last position.
    """
    H, T = call.q.shape[1:3]
    entered = rows[layer.projection].read.reshape(
        H, -1
    )  # (H,E) what W_O reads of each head
    # (H,E) what the logit reads of each head
    back = (as_rows(layer.projection).cpu().double().T @ at_w_o).reshape(H, -1)
    weights = row_weights(call, 0, [T - 1])[:, 0].cpu().double()  # (H,S)
    # of each head its key/value head
    index = resolve_kv_index(H, call.k.shape[1], call.options.kv_index)
    values = call.v[0, list(index)].cpu().double()  # (H,S,E)
    mixed = torch.einsum("hs,hse->he", weights, values)
    # Between the mixed values and what W_O reads there may be a gate, or a norm of the head. It is held as it was in
    # this pass: a factor for each number, (H,E); 1 where there is neither.
    between = _ratio(entered, mixed)
    by_head = (entered * back).sum(1)
    by_token = weights * torch.einsum("hse,he->hs", values, between * back)
    return by_head, by_token, weights


def _ratio(x: Tensor, y: Tensor) -> Tensor:
    """x / y, and 0 where y is 0."""
    return torch.where(y == 0, 0, x / y)


def recorded(
    model: nn.Module, layers: Sequence[Layer]
) -> AbstractContextManager[States]:
    """What the modules that take part in a pass inside a block read and gave at its last position, float64."""
    # an ordered set: each module is heard once
    wanted = dict.fromkeys(_stacked(model, layers))
    for layer in layers:
        parts = layer.block, layer.projection, *layer.block.children()
        wanted |= dict.fromkeys((*layer.around, *parts))

    def last(x: Tensor) -> Tensor:
        # of (1,T,C), or (T,C); of several streams, (1,T,n,C), the numbers of all
        of_tokens = x if x.ndim < 3 else x.flatten(2)
        return of_tokens.flatten(0, -2)[-1].cpu().double()

    return heard(wanted, last)


@contextmanager
def heard(
    modules: Iterable[nn.Module], part: Callable[[Tensor], Tensor]
) -> Iterator[States]:
    """What modules read and give inside this block, or a part of it; of those alone that read and give states."""
    states: States = {}

    def is_state(x: Any) -> bool:
        return isinstance(x, Tensor) and x.ndim > 1 and x.is_floating_point()

    def keep(module: nn.Module, args: Any, keywords: dict[str, Any], gave: Any) -> None:
        # transformers names it where it passes it by name, models of one's own call it x
        inputs = (*args, keywords.get("hidden_states"), *keywords.values())
        read: Any = next(filter(is_state, inputs), None)
        # a tuple begins with the hidden states
        out: Any = next(iter(gave), None) if isinstance(gave, tuple) else gave
        if read is not None and is_state(out):
            states[module] = State(part(read), part(out))

    hooks = [(module.register_forward_hook, keep) for module in modules]
    with hooked(hooks, with_kwargs=True):
        yield states


def is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _stacked(model: nn.Module, layers: Iterable[Layer]) -> dict[nn.Module, str]:
    """The layers of every list that has one with attention, and the names by which a reader knows them."""
    attending = {layer.block: layer.site.name for layer in layers}
    names: dict[nn.Module, str] = {}
    for module in model.modules():
        children = [*module.children()]
        numbered = isinstance(module, nn.ModuleList | nn.Sequential)
        if numbered and not attending.keys().isdisjoint(children):
            for n, child in enumerate(children):
                # one list may hold the whole model
                if not (isinstance(child, nn.Linear) or is_norm(child)):
                    names[child] = f"L{n}"
    return names | attending


def _apart(x: Tensor, y: Tensor) -> float:
    """How far two tensors are from each other, relative to their size; two of zeros are alike."""
    return float((x - y).norm() / (x.norm() + y.norm() + 1e-30))


def _back(norm: nn.Module, row: State, direction: Tensor) -> tuple[Tensor, float]:
    """What `direction` (C,) of a norm's output y reads of its input x: u (C,) and c with u . x + c = direction . y.

    What the norm divided by at this position is held, so that x may be split into parts: y is then linear in x. It is
    computed again in float64: what the model got in half precision is too coarse to be divided by.
    """
    # A copy: other weights in the module itself would reach every thread that uses it.
    twin = copy.deepcopy(norm).cpu().double()

    def normed(x: Tensor) -> Tensor:
        answer: Tensor = twin.forward(x)  # so that no hook is called
        return answer.double()  # some norms compute in float32 and give that

    x, y = row.read, normed(row.read)
    bias = normed(torch.zeros_like(x))  # of zeros a norm makes its bias
    # LayerNorm subtracts the mean of x; then a constant that is added to all numbers changes nothing.
    centres = _apart(normed(x + x.abs().mean()), y) <= CLOSE
    u = _ratio(y - bias, x - x.mean() if centres else x) * direction
    return u - u.mean() if centres else u, float(direction @ bias)
