"""The ladder: one set of weights through every way to compute attention, from scalar loops to the fused kernel.

A rung is prepared from sizes and leaves (W_Q, W_K, W_V, W_O, x) in its own kind of array, and called with x; asked to,
it keeps its steps. Weights are handed to torch's modules as plain tensors: gradients reach the leaves. Axis letters as
in `headwise.spec`. A matrix is (out,in): y = W x.

First comes the certificate of each rung, and of its output exactly as it will be timed: how far it is from the plain
loop, and how far two right computations may be apart. Then the price of the rungs that agree.

A sum of n terms rounds n times at most (Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 3.1),
and what comes out of the layer has passed one such sum a stage. Right rungs stay far below that; in float64 a step that
was taken in float32 exceeds it.
"""

from __future__ import annotations

import math
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise.gpt.presets import check_seed
from headwise.lab.courses.numpy_layer import attend_batched, attend_einsum, attend_loop, causal_mask
from headwise.lab.courses.stacked import MultiHeadAttn, MultiHeadedAttentionWrapper
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import Causal
from headwise.memory import in_turn, peak_of
from headwise.models.hook import observe
from headwise.records import STAGES, Call, Ladder, LadderRung, LadderSizes, Watchable
from headwise.rungs import trace
from headwise.rungs.autograd import Value, dot
from headwise.rungs.cache import KVCache
from headwise.spec import require_size
from headwise.words import Note, key_of, labelled, refusal

Array = NDArray[np.float64]
Leaves = Mapping[str, Any]
Keep = dict[str, Any]  # stage -> q (B,H,T,D), k and v (B,G|H,T,D), scores, weights (B,H,T,T), heads (B,H,T,D), joined
Forward = Callable[[Any, Keep | None], Any]  # x (B,T,C) -> output (B,T,C); with None no step is kept


@dataclass(frozen=True)
class Rung:
    """A way to compute the layer. `prepare` gets the sizes and the leaves, and returns what is then called with x."""

    name: str
    how: str
    kind: str  # "plain" (nested lists), "array" (NumPy) or "tensor" (torch)
    prepare: Callable[[LadderSizes, Leaves], Forward]
    grouped: bool = True  # can it run fewer key/value heads than query heads?
    parameters: Callable[[LadderSizes], int] = lambda n: 2 * n.d_model * (n.d_model + n.kv_width)


def _plain(shared: bool, n: LadderSizes, w: Leaves) -> Forward:
    """Loops over lists. Not shared: every query head is handed keys and values of its own, a copy of its group's."""

    def linear(matrix: Any, x_btc: Any) -> Any:
        return [[[dot(row, token) for row in matrix] for token in document] for document in x_btc]

    def split(x_btc: Any, count: int) -> Any:
        d = n.d_model // n.n_heads
        return [[[token[h * d : (h + 1) * d] for token in document] for h in range(count)] for document in x_btc]

    def forward(x: Any, keep: Keep | None) -> Any:
        q = split(linear(w["W_Q"], x), n.n_heads)
        k, v = (split(linear(w[name], x), n.n_kv_heads) for name in ("W_K", "W_V"))
        if not shared:
            group = n.n_heads // n.n_kv_heads
            k, v = ([[document[h // group] for h in range(n.n_heads)] for document in kv] for kv in (k, v))
        steps = trace(q, k, v, mask=Causal())
        joined = [[[y for head in document for y in head[t]] for t in range(n.tokens)] for document in steps.out]
        if keep is not None:
            keep.update(q=q, k=k, v=v, scores=steps.scores, weights=steps.weights, heads=steps.out, joined=joined)
        return linear(w["W_O"], joined)

    return forward


def _split(x_btc: Any, count: int) -> Any:
    """(B,T,h*d) -> (B,h,T,d), in NumPy and in torch."""
    B, T, width = x_btc.shape
    return x_btc.reshape(B, T, count, width // count).swapaxes(1, 2)


def _arrays(attend: Callable[..., Any], n: LadderSizes, w: Leaves) -> Forward:
    """Products of whole arrays, NumPy or torch, around an attention that gives scores, weights and heads."""
    mask = causal_mask(n.tokens) if isinstance(w["W_Q"], np.ndarray) else None

    def forward(x: Any, keep: Keep | None) -> Any:
        q = _split(x @ w["W_Q"].T, n.n_heads)
        k, v = (_split(x @ w[name].T, n.n_kv_heads) for name in ("W_K", "W_V"))
        scores, weights, heads = attend(q, k, v, mask)
        joined = heads.swapaxes(1, 2).reshape(n.batch, n.tokens, n.d_model)
        if keep is not None:
            keep.update(q=q, k=k, v=v, scores=scores, weights=weights, heads=heads, joined=joined)
        return joined @ w["W_O"].T

    return forward


def _loop(q: Any, k: Any, v: Any, mask: Any) -> tuple[Any, ...]:
    documents = [attend_loop(*qkv, mask) for qkv in zip(q, k, v, strict=True)]
    return tuple(np.stack(step) for step in zip(*documents, strict=True))


def _traced(q: Any, k: Any, v: Any, _: Any) -> tuple[Any, ...]:
    steps = trace(q, k, v, mask=Causal())
    return steps.scores, steps.weights, steps.out


def _give(module: Any, weight: Tensor, name: str = "weight") -> None:
    """A weight as a plain tensor instead of a Parameter, so that gradients flow on to where it was cut from."""
    delattr(module, name)
    object.__setattr__(module, name, weight)


class _Softmaxes(TorchFunctionMode):
    """What `torch.softmax` is given and gives while the block runs: the maps of a class that spells attention out."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Tensor] = []
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.softmax:
            self.scores.append(args[0])
            self.weights.append(result)
        return result


def _module(layer: MultiHeadAttention | Watchable, projection: nn.Linear, run: Callable[[Tensor], Tensor]) -> Forward:
    """Watchers are told q, k, v and heads; `joined` is what W_O is given."""

    def forward(x: Tensor, keep: Keep | None) -> Tensor:
        if keep is None:
            return run(x)
        calls: list[Call] = []
        joined = []
        hook = projection.register_forward_pre_hook(lambda _, inputs: joined.append(inputs[0]))
        with observe(layer, calls.append), _Softmaxes() as maps:
            output = run(x)
        hook.remove()
        q, heads = (torch.cat([getattr(call, name) for call in calls], 2) for name in ("q", "out"))
        k, v = calls[-1].k, calls[-1].v  # of all tokens: a cache holds those of the calls before
        keep.update(q=q, k=k, v=v, heads=heads, joined=torch.cat(joined, 1))
        if maps.scores:
            keep.update(scores=_all_heads(maps.scores), weights=_all_heads(maps.weights))
        return output

    return forward


def _all_heads(maps: list[Tensor]) -> Tensor:
    return maps[0] if maps[0].ndim == 4 else torch.stack(maps, 1)


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    _give(linear, weight)
    return linear


def _stacked(n: LadderSizes, w: Leaves) -> Forward:
    d, group = n.d_model // n.n_heads, n.n_heads // n.n_kv_heads
    wrapper = MultiHeadedAttentionWrapper(n.d_model, d, n.tokens, 0.0, n.n_heads)
    for h, head in enumerate(wrapper.heads):
        for name, leaf, place in (("W_query", "W_Q", h), ("W_key", "W_K", h // group), ("W_value", "W_V", h // group)):
            setattr(head, name, _linear(w[leaf][place * d : (place + 1) * d]))
    projection = _linear(w["W_O"])
    return _module(wrapper, projection, nn.Sequential(wrapper, projection))


def _vectorised(n: LadderSizes, w: Leaves) -> Forward:
    """Keys and values that a group shares are repeated in its weights."""
    layer = MultiHeadAttn(n.d_model, n.d_model, n.tokens, 0.0, n.n_heads)
    d, group = n.d_model // n.n_heads, n.n_heads // n.n_kv_heads
    for name, leaf, times in (("W_query", "W_Q", 1), ("W_key", "W_K", group), ("W_value", "W_V", group)):
        repeated = w[leaf].reshape(-1, d, n.d_model).repeat_interleave(times, 0)
        setattr(layer, name, _linear(repeated.reshape(n.d_model, n.d_model)))
    layer.out_proj = _linear(w["W_O"])
    return _module(layer, layer.out_proj, layer)


def _layer(cached: bool, n: LadderSizes, w: Leaves) -> Forward:
    layer = MultiHeadAttention(n.d_model, n.n_heads, n.n_kv_heads, mask=Causal())
    for name, leaf in (("q_proj", "W_Q"), ("k_proj", "W_K"), ("v_proj", "W_V"), ("o_proj", "W_O")):
        setattr(layer, name, _linear(w[leaf]))
    assert layer.o_proj is not None

    def decode(x: Tensor) -> Tensor:
        cache = KVCache()
        return torch.cat([layer(token, cache=cache) for token in torch.split(x, 1, dim=1)], 1)

    return _module(layer, layer.o_proj, decode if cached else layer)


def _torch_nn(n: LadderSizes, w: Leaves) -> Forward:
    layer = nn.MultiheadAttention(n.d_model, n.n_heads, bias=False, batch_first=True).eval()
    _give(layer, torch.cat([w["W_Q"], w["W_K"], w["W_V"]]), "in_proj_weight")
    _give(layer.out_proj, w["W_O"])
    later = torch.ones(n.tokens, n.tokens, dtype=torch.bool).triu(1)

    def forward(x: Tensor, keep: Keep | None) -> Tensor:
        out: Tensor
        if keep is None:
            out, _ = layer(x, x, x, attn_mask=later, is_causal=True, need_weights=False)
        else:
            out, keep["weights"] = layer(x, x, x, attn_mask=later, average_attn_weights=False)
        return out

    return forward


def _for_each_head(n: LadderSizes) -> int:
    return 4 * n.d_model**2


def _rung(name: str, kind: str, prepare: Callable[[LadderSizes, Leaves], Forward], **more: Any) -> Rung:
    return Rung(name, Note.of(key_of("ladder", f"how {name}")), kind, prepare, **more)


RUNGS = (
    _rung("plain", "plain", partial(_plain, False)),
    _rung("plain GQA", "plain", partial(_plain, True)),
    _rung("stacked heads", "tensor", _stacked, parameters=_for_each_head),
    _rung("course class", "tensor", _vectorised, parameters=_for_each_head),
    _rung("NumPy loop", "array", partial(_arrays, _loop)),
    _rung("NumPy batched", "array", partial(_arrays, attend_batched)),
    _rung("NumPy einsum", "array", partial(_arrays, attend_einsum)),
    _rung("NumPy attend", "array", partial(_arrays, _traced)),
    _rung("torch explicit", "tensor", partial(_arrays, _traced)),
    _rung("torch fused", "tensor", partial(_layer, False)),
    _rung("torch.nn", "tensor", _torch_nn, grouped=False),
    _rung("cached decode", "tensor", partial(_layer, True)),
)


# The certificate of a rung.

TIMED_DTYPE = {"plain": "float64", "array": "float32", "tensor": "float32"}
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24}  # the largest relative error of one rounding
# Of a number besides sums. Less than 20 are counted: of the leaves as they are cast, of a product a stage, of the
# scale, and of softmax, where the least exact exp in use errs by 3 last digits.
ROUNDINGS = 32


def draw_leaves(n: LadderSizes, seed: int) -> dict[str, Array]:
    """The leaves, in float64: first the matrices, drawn as the NumPy course draws its square ones, then x."""
    rng = np.random.default_rng(seed)
    rows = {"W_Q": n.d_model, "W_K": n.kv_width, "W_V": n.kv_width, "W_O": n.d_model}
    leaves = {name: rng.standard_normal((count, n.d_model)) / math.sqrt(n.d_model) for name, count in rows.items()}
    return leaves | {"x": rng.standard_normal((n.batch, n.tokens, n.d_model))}


def cast_leaves(leaves: Mapping[str, Array], kind: str, dtype: str) -> dict[str, Any]:
    if kind == "plain":
        return {name: array.tolist() for name, array in leaves.items()}
    cast = {name: array.astype(dtype) for name, array in leaves.items()}
    return cast if kind == "array" else {name: torch.from_numpy(array) for name, array in cast.items()}


class Certificate:
    """One draw, what the plain loop makes of it, and the tolerances; rungs are then held to it one by one."""

    def __init__(self, sizes: LadderSizes, seed: int) -> None:
        self.sizes = sizes
        self.leaves = draw_leaves(sizes, seed)
        # What outputs are weighed with in the number whose slopes are compared: drawn, so that no error cancels.
        self.cotangent = np.random.default_rng([seed, 1]).standard_normal(self.leaves["x"].shape)
        plain = RUNGS[0]
        began = time.perf_counter()
        self.steps = {name: _numbers(step) for name, step in self._steps(plain).items()}
        self.seconds = time.perf_counter() - began  # of a call of the scalar loops
        self.slopes = self._slopes(plain)
        self.tolerances = self._tolerances()

    def _tolerances(self) -> dict[str, float]:
        """For each stage and slope in float64 the largest difference that passes, and for the output as it is timed."""
        n = self.sizes
        longest = max(n.d_model, n.batch * n.tokens)  # terms of a sum: along the width, or of a slope along the tokens
        # A slope has passed more sums, the way back included, but most are shorter: right rungs stay below a fiftieth.
        roundings = len(STAGES) * longest + ROUNDINGS
        # What is summed up may cancel: the roundings of a small number are those of the largest ones before it.
        seen = np.tri(n.tokens, dtype=bool)
        steps = self.steps | {"scores": np.where(seen, self.steps["scores"], 0)}
        largest = max(float(abs(step).max()) for step in steps.values())
        steepest = max(float(abs(slope).max()) for slope in self.slopes.values())
        magnitudes = dict.fromkeys(self.steps, largest) | dict.fromkeys(self.slopes, steepest)
        # Twice: the plain loop rounds as much as the rung that is held against it.
        tolerances = {name: 2 * UNIT["float64"] * roundings * size for name, size in magnitudes.items()}
        for dtype, unit in UNIT.items():
            tolerances[f"timed {dtype}"] = (unit + UNIT["float64"]) * roundings * largest
        return tolerances

    def certify(self, rung: Rung) -> LadderRung:
        n, dtype = self.sizes, TIMED_DTYPE[rung.kind]
        result = LadderRung(rung.name, rung.how, dtype, rung.parameters(n))
        if n.n_kv_heads != n.n_heads and not rung.grouped:
            refused = Note.of("ladder.cannot_share", n_kv_heads=n.n_kv_heads, n_heads=n.n_heads)
            return replace(result, refused=refused, not_timed=refused)
        steps = self._steps(rung)
        slopes = {} if rung.kind == "array" else self._slopes(rung)  # NumPy has no gradients
        differences = {name: self._difference(name, steps[name], self.steps[name]) for name in STAGES if name in steps}
        gradients = {name: self._difference(name, slope, self.slopes[name]) for name, slope in slopes.items()}
        leaves = cast_leaves(self.leaves, rung.kind, dtype)
        with torch.no_grad():
            timed = self._difference("output", rung.prepare(n, leaves)(leaves["x"], None), self.steps["output"])
        everything = differences | gradients | {f"timed {dtype}": timed}
        wrong = [
            labelled("ladder", name) for name, far in everything.items() if far is None or far > self.tolerances[name]
        ]
        return replace(
            result,
            differences=differences,
            gradients=gradients or None,
            timed_difference=timed,
            agrees=not wrong,
            not_timed=Note.of("ladder.disagrees", steps=wrong) if wrong else None,
        )

    def _steps(self, rung: Rung) -> dict[str, Any]:
        leaves = cast_leaves(self.leaves, rung.kind, "float64")
        keep: dict[str, Any] = {}
        with torch.no_grad():
            output = rung.prepare(self.sizes, leaves)(leaves["x"], keep)
        return keep | {"output": output}

    def _slopes(self, rung: Rung) -> dict[str, Any]:
        """The slope of sum(output * cotangent) along every leaf, on the path that training takes."""
        if rung.kind == "tensor":
            leaves = cast_leaves(self.leaves, rung.kind, "float64")
            for leaf in leaves.values():
                leaf.requires_grad_()
            output = rung.prepare(self.sizes, leaves)(leaves["x"], None)
            (output * torch.from_numpy(self.cotangent)).sum().backward()
            return {name: leaf.grad for name, leaf in leaves.items()}
        values = {name: np.vectorize(Value, otypes=[object])(array) for name, array in self.leaves.items()}
        leaves = {name: array.tolist() for name, array in values.items()}
        output = np.array(rung.prepare(self.sizes, leaves)(leaves["x"], None), dtype=object)
        loss = dot(output.ravel().tolist(), self.cotangent.ravel().tolist())
        assert isinstance(loss, Value)
        loss.backward()
        return {name: np.vectorize(lambda value: value.grad, otypes=[float])(array) for name, array in values.items()}

    def _difference(self, name: str, step: Any, expected: Array) -> float | None:
        """The largest absolute difference; None when the shapes differ or a number is not finite."""
        numbers, n = _numbers(step), self.sizes
        if name in ("k", "v") and numbers.ndim == 4 and numbers.shape[1] == n.n_kv_heads:
            numbers = numbers.repeat(n.n_heads // n.n_kv_heads, axis=1)  # the plain loop has a copy for each query head
        if numbers.shape != expected.shape:
            return None
        gap = abs(numbers - expected)
        if name == "scores":  # what stands where a query may not look does not count
            gap = np.where(np.tri(n.tokens, dtype=bool), gap, 0)
        largest = float(gap.max())
        return largest if math.isfinite(largest) else None


def _numbers(step: Any) -> Array:
    """Lists, arrays and tensors as a float64 array."""
    if step is None:
        return np.zeros(0)  # of no stage's shape
    return np.asarray(step.detach() if isinstance(step, torch.Tensor) else step, np.float64)


# All rungs: certificates, then prices.

Report = Callable[[str, int, int], None]  # is told what begins, how many tasks are done, how many there are

SCALAR_WORK = 600_000  # what the scalar autograd does in about half a second; see `_work`


def run_ladder(
    width: int = 64,
    heads: int = 4,
    kv_heads: int | None = None,
    tokens: int = 16,
    batch: int = 1,
    repeats: int = 7,
    seed: int = 0,
    longest: float = 3.0,
    report: Report | None = None,
) -> Ladder:
    """Run one causal attention layer on every rung: the certificate, then the costs of the rungs that agree.

    width     of the tokens; heads of width / heads each. Here sizes are called as the options of `headwise ladder` are
    kv_heads  key/value heads, a divisor of heads; default as many as heads
    repeats   timed calls of each rung, in turn, the median counts; fewer where they would take long
    seed      of the weights W_Q, W_K, W_V, W_O (standard normal times 1/sqrt(width)) and of x (standard normal)
    longest   seconds; the scalar loops are not timed when one call would take longer

    What is too large for the scalar loops is certified at a smaller size: see `certified` and `note`. Costs are of
    forward calls without gradients, in float32 (scalars: float64). HeadwiseError for sizes that do not fit.
    """
    sizes = LadderSizes(batch, tokens, width, heads, heads if kv_heads is None else kv_heads)
    _check(sizes, repeats, seed)
    small = certificate_sizes(sizes)
    total = 2 * len(RUNGS) + 1  # tasks: each rung is certified, then called; then all are timed together
    tell = report or (lambda text, done, total: None)
    with torch.random.fork_rng(devices=[]):  # the modules draw weights of their own before they are given these
        certificate = Certificate(small, seed)
        results = []
        for i, rung in enumerate(RUNGS):
            tell(Note.of("ladder.certifies", rung=labelled("ladder", rung.name)), i, total)
            # The certificate is of the small sizes, the parameters are of those that were asked for.
            results.append(replace(certificate.certify(rung), parameters=rung.parameters(sizes)))
        leaves = draw_leaves(sizes, seed)
        calls: dict[int, Callable[[], object]] = {}
        scalar_call = certificate.seconds * _work(sizes) / _work(small)  # seconds, about
        for i, rung in enumerate(RUNGS):
            tell(Note.of("ladder.calls", rung=labelled("ladder", rung.name)), len(RUNGS) + i, total)
            if rung.kind == "plain" and scalar_call > longest:
                reason = Note.of("ladder.too_long", seconds=f"{scalar_call:.0f}", longest=f"{longest:g}")
                results[i] = replace(results[i], not_timed=results[i].not_timed or reason)
            elif results[i].agrees:
                arrays = cast_leaves(leaves, rung.kind, TIMED_DTYPE[rung.kind])
                calls[i] = partial(rung.prepare(sizes, arrays), arrays["x"], None)
        tell(Note.of("ladder.times_all"), total - 1, total)
        times = in_turn(calls, repeats, longest)
        # After the times: what a first call loads is no peak of the rung.
        peaks = {i: (peak_of if RUNGS[i].kind == "tensor" else _python_peak)(call) for i, call in calls.items()}
    tell(Note.of("ladder.done"), total, total)
    for i, taken in times.items():
        ms = 1000 * statistics.median(taken)
        results[i] = replace(results[i], ms=ms, repeats=len(taken), peak_bytes=peaks[i])
    priced = tuple(results)
    agree = all(result.agrees for result in priced if result.refused is None)
    note = None if small == sizes else Note.of("ladder.certified", sizes=small.note)
    threads = torch.get_num_threads()
    return Ladder(sizes, small, seed, threads, certificate.tolerances, priced, agree, note)


def _check(n: LadderSizes, repeats: int, seed: int) -> None:
    """Refuse sizes that are no counts, a seed that is none, and heads that do not divide evenly."""
    names = ("batch", "tokens", "width", "heads", "kv_heads", "repeats")  # the first five as LadderSizes has them
    for name, value in zip(names, (*vars(n).values(), repeats), strict=True):
        require_size(name, value)
    check_seed(seed)
    if n.d_model % n.n_heads:
        raise refusal("ladder_heads", heads=n.n_heads, width=n.d_model)
    if n.n_heads % n.n_kv_heads:
        raise refusal("ladder_groups", kv_heads=n.n_kv_heads, heads=n.n_heads)


def certificate_sizes(n: LadderSizes) -> LadderSizes:
    """The sizes themselves; where the scalar autograd would take too long, the least that tell all axes apart."""
    if _work(n) <= SCALAR_WORK:
        return n
    # Primes that differ, but for documents and query heads of a group; never more than is asked for.
    n_kv_heads, group = min(n.n_kv_heads, 3), min(n.n_heads // n.n_kv_heads, 2)
    n_heads, head_dim = n_kv_heads * group, min(n.d_model // n.n_heads, 5)
    return LadderSizes(min(n.batch, 2), min(n.tokens, 11), n_heads * head_dim, n_heads, n_kv_heads)


def _work(n: LadderSizes) -> int:
    """A scalar loop's multiplications; a place of the attention map costs it about 100 besides."""
    linear = 2 * n.d_model * (n.d_model + n.kv_width)  # of a token
    attention = n.tokens * (2 * n.d_model + 100 * n.n_heads)
    return n.batch * n.tokens * (linear + attention)


def _python_peak(call: Callable[[], object]) -> int:
    """The most bytes that Python and NumPy held at a time."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
