"""Direct attribution: what each part of a model adds to a logit, with the last norm held as it was.

A logit is a product of the last hidden state with a row of W_U, and that state is a sum: of the embedding, of what each
head wrote through its part of W_O, of what each feed-forward wrote, and of biases. So the logit is a sum over the same
parts (Elhage et al. 2021, "A mathematical framework for transformer circuits"; Wang et al. 2022, arXiv 2211.00593,
appendix on direct effects). What a head writes is in turn a sum over the tokens that it looks at.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads.ablate import kv_index_of
from headwise.heads.blocks import row_weights
from headwise.heads.patch import Compared, HeadNumbers, Reading, Values
from headwise.heads.table import Numbers, frame
from headwise.models.ask import ROWS, evaluating, output_matrix, require_next
from headwise.models.hook import hooked
from headwise.models.open import row_of
from headwise.models.sites import Layer, as_rows, layers_of, require_held
from headwise.records import Call

if TYPE_CHECKING:
    from pandas import DataFrame


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
    heads: Numbers  # what each adds to the logit
    # by layer, "L0": what it adds beside its heads; all of one without attention, a delta net
    feed_forwards: Numbers
    embedding: float  # of the token at the position, and of the position itself
    bias: float  # of W_O, of norms, and of the output matrix
    logit: float  # what the model says, before a softcap of its logits
    # head -> (S,): what it adds by looking at each token; the sum is the head's
    tokens: dict[str, Values]

    @property
    def parts(self) -> dict[str, Numbers]:
        """All that adds to the logit, by its kind."""
        rest = {"embedding": self.embedding, "bias": self.bias}
        return {"head": self.heads, "feed_forward": self.feed_forwards, "rest": rest}

    @property
    def total(self) -> float:
        """The sum of all parts: the logit, but for rounding."""
        return math.fsum(x for parts in self.parts.values() for x in parts.values())

    def to_frame(self) -> DataFrame:
        """A row for each head, feed-forward and other part; `pandas.DataFrame(parts.tokens)` has the tokens."""
        return frame(
            [
                {"part": name, "kind": kind, "adds": adds}
                for kind, of_kind in self.parts.items()
                for name, adds in of_kind.items()
            ]
        )

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
    require_held(model, "what each part adds")
    row = row_of(model, ids)[0]
    T = len(row)
    if not -T <= position < T:
        raise HeadwiseError(f"position={position} is not among the {T} tokens")
    if callable(target):
        raise HeadwiseError("target is a function; pass one token, or two")
    words = [target] if isinstance(target, int | str) else list(target)
    if len(words) not in (1, 2):
        raise HeadwiseError(
            f"target has {len(words)} tokens; pass one, or two whose logits are compared"
        )
    compared = Compared.of(model, words)
    layers = layers_of(model)
    with evaluating(model), heard(model.modules(), _last) as rows:
        # The text is cut behind the position, which so becomes the last one: what comes later changes nothing here.
        text = Reading(model, row[: position % T + 1])
    # layers of pictures may not run
    ran = [layer for layer in layers if layer.site.name in text.calls]
    return _added(text, ran, rows, compared)


def _added(
    text: Reading, layers: list[Layer], rows: States, target: Compared
) -> Attribution:
    """What each part of a model adds to a logit. Raises HeadwiseError where the parts do not sum to it.

    A logit is direction . x, x being the last hidden state. `direction` (C,) says what the logit reads: of the last
    hidden state it is a row of W_U. Taken back through the last norm, it is what the logit reads of the residual
    stream, and so of all that parts have written there. Whatever is constant on the way goes to the bias.

    rows  what modules read and gave while the text was read
    """
    model, kind = text.model, type(text.model).__name__
    # CLOSE for this pass: in a coarse number format it is the spacing of its numbers, 2^-7 of bfloat16.
    spacings = [torch.finfo(call.out.dtype).eps for call in text.calls.values()]
    close = max(CLOSE, *spacings)
    direction, offset = _unembedding(model, target)
    attending = {layer.block: layer for layer in layers}
    names = _stacked(model, layers)
    # the layers in the order in which they ran, with those that have no attention
    chain = [module for module in rows if module in names]
    sizes = {len(state) for block in chain for state in rows[block]}
    if sizes != {len(direction)} or not attending.keys() <= rows.keys():
        raise HeadwiseError(
            f"the layers of {kind} read and give {sorted(sizes)} numbers a token, and its output matrix reads "
            f"{len(direction)}: what its parts add is not known, as of several streams; patch the heads"
        )
    # (C,) the residual stream behind the last layer, and what the output matrix reads
    normed = last = rows[chain[-1]].gave
    # the norm behind the last layer: the last module beside the layers that reads what that gave
    norm = None
    for module, row in rows.items():
        is_beside = module in layers[-1].around and row.gave.shape == last.shape
        if is_beside and row.read.equal(last):
            norm, normed = module, row.gave
    scale = _logit_scale(model, normed, text.answer.cpu().double(), close)
    direction, bias = scale * direction, scale * offset
    logit = float(direction @ normed) + bias
    # Products that sum to the logit, or to a part of it. The model has rounded a factor of each.
    rounded = [direction * normed]
    if norm is not None:
        direction, constant = _back(norm, rows[norm], direction)
        bias += constant
    heads, feed_forwards, tokens = Numbers(), Numbers(), dict[str, Values]()
    for block in chain:
        change = rows[block].gave - rows[block].read
        if block not in attending:
            feed_forwards[names[block]] = float(direction @ change)
            continue
        layer = attending[block]
        site = layer.site
        # Torch's own attention calls no module for W_O, and gives what that gave itself.
        module = layer.projection if layer.projection in rows else site.module
        out = rows[module].gave
        wrote, at_w_o, constant = _way_of(kind, layer, out, rows, close, direction)
        bias += constant
        rounded += [direction * wrote, at_w_o * out]
        parts = _heads_of(text.calls[site.name], layer, at_w_o)
        for name, share, by_token in zip(site.heads, *parts, strict=True):
            heads[name], tokens[name] = float(share), by_token.numpy()
        # The feed-forward gets what is left of the layer, whatever that is. So the sum cannot be wrong by it: the test
        # below says whether heads, norms and biases are right, and nothing of the feed-forwards.
        feed_forwards[site.name] = float(direction @ (change - wrote))
    # of the token and of its position
    embedding = float(direction @ rows[chain[0]].read)
    sums = heads, feed_forwards, embedding, bias
    place = text.ids.shape[1] - 1
    whole = Attribution(target.tokens, place, *sums, logit, tokens)
    # Each product in `rounded` may be off by `close` of its size. Roundings fall to either side and partly cancel:
    # those of many numbers add up as a norm does, not as a sum. Twice that is allowed, a round margin.
    rounding = 2 * close * float(torch.cat(rounded).norm())
    # The 1.0 is for a logit near 0, which is a difference of large parts.
    if abs(whole.total - logit) > CLOSE * max(abs(logit), 1.0) + rounding:
        is_adapted = any(list(layer.projection.children()) for layer in layers)
        merge = "; merge the adapter of its output projections first"
        remedy = merge if is_adapted else ""
        raise HeadwiseError(
            f"{kind}: the parts sum to {whole.total:.6g}, the logit is {logit:.6g}: "
            f"what its layers add up is not known well enough{remedy}"
        )
    return whole


def _unembedding(model: nn.Module, target: Compared) -> tuple[Tensor, float]:
    """What a logit reads of the last hidden state, (C,), and its bias; of two the differences."""
    matrix, bias = output_matrix(model)
    target.check(len(matrix))

    def compared(rows: Tensor) -> Any:
        sides = [rows[list(side)] for side in (target.answer, target.other) if side]
        answer, *other = (side.cpu().double().mean(0) for side in sides)
        return answer - sum(other)

    return compared(matrix), 0.0 if bias is None else float(compared(bias))


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
    logits = logits[:ROWS]
    wide = torch.promote_types(some.dtype, torch.float32)
    raw = (some.to(wide) @ normed.to(some.device, wide)).cpu().double()
    if bias is not None:
        raw = raw + bias[:ROWS].cpu().double()
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
    out: Tensor,
    rows: States,
    close: float,
    direction: Tensor,
) -> tuple[Tensor, Tensor, float]:
    """How `out`, what W_O of a layer gives, comes into the residual stream: as it is, or through a norm after it.

    What the attention adds to the stream (C,); what the logit reads of W_O's output (C,), of which it reads `direction`
    in the stream; the constant on the way. Raises HeadwiseError where the rest of the layer does not go on with the
    stream that this makes.
    """
    inner = {child: rows[child] for child in layer.block.children() if child in rows}
    block = rows[layer.block]
    # Granite has a factor, and no norm after W_O.
    factor = getattr(layer.block, "residual_multiplier", 1.0)
    at_w_o = factor * direction
    wrote = factor * out
    constant = 0.0
    is_normed = False
    for child, row in inner.items():
        # What reads W_O's output and gives it back as it is, a dropout for instance, is no norm.
        if row.read.equal(out) and not row.gave.equal(out):
            wrote = row.gave
            at_w_o, constant = _back(child, row, direction)
        # The layer ends with a norm of the whole stream, as of GPT-1: what was written is no part of its output.
        # (Bloom's feed-forward is given the stream beside what it reads, and gives the layer's output, too.)
        is_normed = is_normed or (is_norm(child) and row.gave.equal(block.gave))
    state = block.read + wrote
    # Either a child reads the stream, as the norm of a feed-forward does; or what a child gives is added to it and
    # makes the layer's output, as of a feed-forward that runs beside the attention.
    # Without a feed-forward the state is the layer's output. Of a mixer beside the attention (Falcon H1) the same.
    known = [block.gave, *(row.read for row in inner.values())]
    made = [row.gave for row in inner.values() if row.gave.shape == state.shape]
    sums = [state, *(state + x for x in made)]
    pairs = [(x, y) for x in known for y in sums if x.shape == y.shape]
    if is_normed or not any(_apart(x, y) <= close for x, y in pairs):
        raise HeadwiseError(
            f"{kind}: it is not known how the attention of {layer.site.name} enters the residual stream; patch the "
            f"heads"
        )
    bias = getattr(layer.projection, "bias", None)
    if bias is not None:  # it belongs to no head
        constant += float(at_w_o @ bias.cpu().double())
    return wrote, at_w_o, constant


def _heads_of(call: Call, layer: Layer, at_w_o: Tensor) -> tuple[Tensor, Tensor]:
    """What each head adds, (H,); and what it adds for each token that it looks at, (H,S).

    `at_w_o` (C,) is what the logit reads of the output of W_O; all of it at the last position.
    """
    entered = call.out[0, :, -1].cpu().double()  # (H,E) what W_O reads of each head
    # (H,E) what the logit reads of each head
    back = as_rows(layer.projection).cpu().double().T @ at_w_o
    back = back.reshape(len(entered), -1)
    weights = row_weights(call, 0, [call.n_queries - 1])[:, 0].cpu().double()  # (H,S)
    values = call.v[0, kv_index_of(call)].cpu().double()  # (H,S,E)
    mixed = torch.einsum("hs,hse->he", weights, values)
    # Between the mixed values and what W_O reads there may be a gate, or a norm of the head. It is held as it was in
    # this pass: a factor for each number, (H,E); 1 where there is neither.
    between = _ratio(entered, mixed)
    by_token = weights * torch.einsum("hse,he->hs", values, between * back)
    return (entered * back).sum(1), by_token


def _ratio(x: Tensor, y: Tensor) -> Tensor:
    """x / y, and 0 where y is 0."""
    return torch.where(y == 0, 0, x / y)


def _last(x: Tensor) -> Tensor:
    """The last position of (1,T,C), or (T,C), in float64; of several streams, (1,T,n,C), the numbers of all."""
    of_tokens = x if x.ndim < 3 else x.flatten(2)
    return of_tokens.flatten(0, -2)[-1].cpu().double()


@contextmanager
def heard(
    modules: Iterable[nn.Module], part: Callable[[Tensor], Tensor]
) -> Iterator[States]:
    """What modules read and give inside this block, or a part of it; of those alone that read and give states."""
    states = {}

    def is_state(x: Any) -> bool:
        # an expert of a mixture may be given no token
        is_full = isinstance(x, Tensor) and x.ndim > 1 and x.numel() > 0
        return is_full and x.is_floating_point()

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
    names = {}
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        for n, child in enumerate(module):
            # one list may hold the whole model
            is_layer = not (isinstance(child, nn.Linear) or is_norm(child))
            if is_layer and not attending.keys().isdisjoint(module):
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
        answer = twin.forward(x)  # so that no hook is called
        return answer.double()  # some norms compute in float32 and give that

    x = row.read
    y = normed(row.read)
    bias = normed(torch.zeros_like(x))  # of zeros a norm makes its bias
    # LayerNorm subtracts the mean of x; then a constant that is added to all numbers changes nothing.
    centres = _apart(normed(x + x.abs().mean()), y) <= CLOSE
    u = _ratio(y - bias, x - x.mean() if centres else x) * direction
    return u - u.mean() if centres else u, float(direction @ bias)
