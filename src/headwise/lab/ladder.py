"""The ladder: one set of weights through every way to compute attention, from scalar loops to the fused kernel.

A rung is prepared from sizes and leaves (W_Q, W_K, W_V, W_O, x) in its own kind of array, and called with x. It can
keep what it makes at each stage. Weights are handed to torch's modules as plain tensors, so that gradients reach the
leaves. Axis letters as in `headwise.spec`. A matrix is (out,in): y = W x.

First each rung gets its certificate: how far its stages are from those of the plain loop, and how far two right
computations may be apart. Its output is held against the plain loop once more exactly as it will be timed, in float32
where that is so. Then the rungs that agree get their price.

A sum of n terms rounds n times at most (Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 3.1),
and what comes out of the layer has passed one such sum a stage. That many roundings are tolerated. Right rungs stay
far below; a step that was taken in float32 where all should be float64 exceeds it.
"""

from __future__ import annotations

import math
import statistics
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise.errors import HeadwiseError
from headwise.gpt.presets import check_seed
from headwise.lab.courses.numpy_layer import attend_batched, attend_einsum, attend_loop, causal_mask
from headwise.lab.courses.stacked import MultiHeadAttn, MultiHeadedAttentionWrapper
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import Causal
from headwise.memory import in_turn, peak_of
from headwise.records import STAGES, Ladder, LadderRung, LadderSizes
from headwise.rungs import trace
from headwise.rungs.autograd import Value, dot
from headwise.rungs.cache import KVCache
from headwise.spec import require_size
from headwise.words import Note, labelled

Array = NDArray[np.float64]
Leaves = Mapping[str, Any]  # "W_Q", "W_K", "W_V", "W_O" and "x", as nested lists, arrays or tensors
Keep = dict[str, Any]  # stage -> q (B,H,T,D), k and v (B,G|H,T,D), scores, weights (B,H,T,T), heads (B,H,T,D), joined
Forward = Callable[[Any, Keep | None], Any]  # x (B,T,C) -> output (B,T,C); with None no step is kept


@dataclass(frozen=True)
class Rung:
    """A way to compute the layer. `prepare` gets the sizes and the leaves, and returns what is then called with x."""

    name: str
    kind: str  # "plain" (nested lists), "array" (NumPy) or "tensor" (torch)
    prepare: Callable[[LadderSizes, Leaves], Forward]
    grouped: bool = True  # can it run fewer key/value heads than query heads?
    copies: bool = False  # has each query head keys and values of its own, copies of its group's?

    def parameters(self, n: LadderSizes) -> int:
        # Of W_Q and W_O, (d_model,d_model), and of W_K and W_V, (kv_width,d_model), or as W_Q where they are copied.
        return 2 * n.d_model * (n.d_model + (n.d_model if self.copies else n.kv_width))


def _split(x_btc: Any, head_dim: int) -> Any:
    """(B,T,h*d) -> (B,h,T,d), in NumPy and in torch."""
    return x_btc.reshape(*x_btc.shape[:2], -1, head_dim).swapaxes(1, 2)


def _plain(shared: bool, n: LadderSizes, w: Leaves) -> Forward:
    """Loops over lists of floats or `Value`s. NumPy computes nothing: its arrays of objects are only cut into heads.

    Not shared: every query head is handed keys and values of its own, a copy of its group's.
    """

    def linear(name: str, x_btc: Any) -> Any:
        rows = [[[dot(row, token) for row in w[name]] for token in document] for document in x_btc]
        return np.array(rows, dtype=object)

    def forward(x: Any, keep: Keep | None) -> Any:
        q, k, v = (_split(linear(name, x), n.head_dim) for name in ("W_Q", "W_K", "W_V"))
        if not shared:
            k, v = (kv.repeat(n.n_heads // n.n_kv_heads, axis=1) for kv in (k, v))
        steps = trace(q.tolist(), k.tolist(), v.tolist(), mask=Causal())
        joined = np.array(steps.out, dtype=object).swapaxes(1, 2).reshape(n.batch, n.tokens, n.d_model)
        if keep is not None:
            keep.update(q=q, k=k, v=v, scores=steps.scores, weights=steps.weights, heads=steps.out, joined=joined)
        return linear("W_O", joined.tolist())

    return forward


def _arrays(attend: Callable[..., Any], n: LadderSizes, w: Leaves) -> Forward:
    """Products of whole arrays, NumPy or torch, around an attention that gives scores, weights and heads."""
    # In torch the only attention that comes here is `_traced`, which has a mask of its own.
    mask = causal_mask(n.tokens) if isinstance(w["W_Q"], np.ndarray) else None

    def forward(x: Any, keep: Keep | None) -> Any:
        q, k, v = (_split(x @ w[name].T, n.head_dim) for name in ("W_Q", "W_K", "W_V"))
        scores, weights, heads = attend(q, k, v, mask)
        joined = heads.swapaxes(1, 2).reshape(n.batch, n.tokens, n.d_model)
        if keep is not None:
            keep.update(q=q, k=k, v=v, scores=scores, weights=weights, heads=heads, joined=joined)
        return joined @ w["W_O"].T

    return forward


def _loop(q: Any, k: Any, v: Any, mask: Any) -> tuple[Any, ...]:
    """`attend_loop` knows heads, but no batch: each document on its own, then all of a step side by side."""
    documents = [attend_loop(*qkv, mask) for qkv in zip(q, k, v, strict=True)]
    return tuple(np.stack(step) for step in zip(*documents, strict=True))


def _traced(q: Any, k: Any, v: Any, _: Any) -> tuple[Any, ...]:
    """`trace` of NumPy or torch, which takes a mask of ours in place of an array."""
    steps = trace(q, k, v, mask=Causal())
    return steps.scores, steps.weights, steps.out


def _give(module: nn.Module, name: str, weight: Tensor) -> None:
    """A weight as a plain tensor instead of a Parameter, so that gradients flow on to where it was cut from."""
    delattr(module, name)
    setattr(module, name, weight)


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    _give(linear, "weight", weight)
    return linear


class _Recorder(TorchFunctionMode):
    """Within its block, what torch's `linear` and `softmax` are given and give: the stages of modules that run."""

    def __init__(self) -> None:
        super().__init__()
        # Matrix of a `linear` -> x, or W x, of its calls. Tensors as keys are told apart as objects, not by numbers.
        self.inputs: dict[Tensor, list[Tensor]] = defaultdict(list)
        self.outputs: dict[Tensor, list[Tensor]] = defaultdict(list)
        self.scores: list[Tensor] = []  # what each `softmax` was given
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.linear:
            x, matrix = args[:2]
            self.inputs[matrix].append(x)
            self.outputs[matrix].append(result)
        elif func is torch.softmax:
            self.scores.append(args[0])
            self.weights.append(result)
        return result


def _modules(n: LadderSizes, run: Callable[[Tensor], Tensor], matrices: Sequence[Sequence[Tensor]]) -> Forward:
    """A rung that runs modules of torch, and finds their stages by the matrices of their linear layers.

    run       x (B,T,C) -> output (B,T,C)
    matrices  four lists of the very tensors that the modules hold: those that make q, k and v, each list with one for
              all heads or one for each head; and W_O alone
    """
    *inner, (w_o,) = matrices

    def forward(x: Tensor, keep: Keep | None) -> Tensor:
        if keep is None:
            return run(x)
        with _Recorder() as recorder:
            output = run(x)
        # A linear layer is called once, or once for each token (cached decode): its calls are joined along T, axis 1.
        # Where there is one for each head, the heads are joined along the width, axis 2.
        for name, parts in zip("qkv", inner, strict=True):
            made = [torch.cat(recorder.outputs[part], 1) for part in parts]
            keep[name] = _split(torch.cat(made, 2), n.head_dim)
        joined = torch.cat(recorder.inputs[w_o], 1)
        keep.update(joined=joined, heads=_split(joined, n.head_dim))
        for name, maps in (("scores", recorder.scores), ("weights", recorder.weights)):
            # Of each head (B,T,T), or of all at once (B,H,T,T): `view` makes both (B,H,T,T).
            if maps:  # the fused kernel hands out none
                keep[name] = torch.stack(maps, 1).view(n.batch, n.n_heads, n.tokens, n.tokens)
        return output

    return forward


def _course_weights(n: LadderSizes, w: Leaves) -> dict[str, Tensor]:
    """The matrices as the courses have them: keys and values that a group shares are repeated for each of its heads."""
    group = n.n_heads // n.n_kv_heads
    weights = {"W_query": w["W_Q"]}
    for name, leaf in (("W_key", "W_K"), ("W_value", "W_V")):
        heads = w[leaf].unflatten(0, (n.n_kv_heads, n.head_dim))
        weights[name] = heads.repeat_interleave(group, 0).flatten(0, 1)
    return weights


def _stacked(n: LadderSizes, w: Leaves) -> Forward:
    # d_in, d_out of one head, context_length, dropout, num_heads.
    wrapper = MultiHeadedAttentionWrapper(n.d_model, n.head_dim, n.tokens, 0.0, n.n_heads)
    matrices = {name: weight.chunk(n.n_heads) for name, weight in _course_weights(n, w).items()}
    for name, parts in matrices.items():
        for head, part in zip(wrapper.heads, parts, strict=True):
            setattr(head, name, _linear(part))
    return _modules(n, nn.Sequential(wrapper, _linear(w["W_O"])), [*matrices.values(), [w["W_O"]]])


def _vectorised(n: LadderSizes, w: Leaves) -> Forward:
    layer = MultiHeadAttn(n.d_model, n.d_model, n.tokens, 0.0, n.n_heads)  # d_out is that of all heads together
    return _with_matrices(n, layer, layer, {**_course_weights(n, w), "out_proj": w["W_O"]})


def _layer(cached: bool, n: LadderSizes, w: Leaves) -> Forward:
    layer = MultiHeadAttention(n.d_model, n.n_heads, n.n_kv_heads, mask=Causal())

    def decode(x: Tensor) -> Tensor:
        cache = KVCache()  # fresh in each call: one token after another, each beside the keys and values before it
        return torch.cat([layer(token, cache=cache) for token in torch.split(x, 1, dim=1)], 1)

    matrices = {"q_proj": w["W_Q"], "k_proj": w["W_K"], "v_proj": w["W_V"], "o_proj": w["W_O"]}
    return _with_matrices(n, layer, decode if cached else layer, matrices)


def _with_matrices(
    n: LadderSizes, layer: nn.Module, run: Callable[[Tensor], Tensor], matrices: Mapping[str, Tensor]
) -> Forward:
    """A layer with these matrices: the name of a projection in it -> its matrix, in the order q, k, v, W_O."""
    for name, matrix in matrices.items():
        setattr(layer, name, _linear(matrix))
    return _modules(n, run, [[matrix] for matrix in matrices.values()])


def _torch_nn(n: LadderSizes, w: Leaves) -> Forward:
    layer = nn.MultiheadAttention(n.d_model, n.n_heads, bias=False, batch_first=True)
    _give(layer, "in_proj_weight", torch.cat([w["W_Q"], w["W_K"], w["W_V"]]))
    _give(layer.out_proj, "weight", w["W_O"])
    later = torch.ones(n.tokens, n.tokens, dtype=torch.bool).triu(1)  # True forbids: above the diagonal

    def forward(x: Tensor, keep: Keep | None) -> Tensor:
        out: Tensor
        if keep is None:  # as it is timed: without weights it takes the fused kernel, to which is_causal is a hint
            out, _ = layer(x, x, x, attn_mask=later, is_causal=True, need_weights=False)
        else:  # the weights are the only stage that it hands out
            out, keep["weights"] = layer(x, x, x, attn_mask=later, average_attn_weights=False)
        return out

    return forward


RUNGS = (  # the first is the plain loop, which all are held against
    Rung("plain", "plain", partial(_plain, False)),
    Rung("plain GQA", "plain", partial(_plain, True)),
    Rung("stacked heads", "tensor", _stacked, copies=True),
    Rung("course class", "tensor", _vectorised, copies=True),
    Rung("NumPy loop", "array", partial(_arrays, _loop)),
    Rung("NumPy batched", "array", partial(_arrays, attend_batched)),
    Rung("NumPy einsum", "array", partial(_arrays, attend_einsum)),
    Rung("NumPy attend", "array", partial(_arrays, _traced)),
    Rung("torch explicit", "tensor", partial(_arrays, _traced)),
    Rung("torch fused", "tensor", partial(_layer, False)),
    Rung("torch.nn", "tensor", _torch_nn, grouped=False),
    Rung("cached decode", "tensor", partial(_layer, True)),
)


# The certificate of a rung.

TIMED_DTYPE = {"plain": "float64", "array": "float32", "tensor": "float32"}  # a float of Python has 64 bits
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24}  # the largest relative error of one rounding
# Roundings of a number besides those of sums. Less than 20 can be counted: of the leaves as they are cast, of a
# product a stage, of the scale, and of softmax, whose least exact exp in use errs by 3 last digits. 32 is safe.
ROUNDINGS = 32


def draw_leaves(n: LadderSizes, seed: int) -> dict[str, Array]:
    """The leaves, in float64: first the matrices, drawn as the NumPy course draws its square ones, then x."""
    rng = np.random.default_rng(seed)
    rows = {"W_Q": n.d_model, "W_K": n.kv_width, "W_V": n.kv_width, "W_O": n.d_model}
    leaves = {name: rng.standard_normal((count, n.d_model)) / math.sqrt(n.d_model) for name, count in rows.items()}
    return leaves | {"x": rng.standard_normal((n.batch, n.tokens, n.d_model))}


def cast_leaves(leaves: Mapping[str, Array], kind: str, dtype: str) -> dict[str, Any]:
    """The leaves in a rung's kind of array; lists of Python have float64, whatever `dtype` says."""
    if kind == "plain":
        return {name: array.tolist() for name, array in leaves.items()}
    cast = {name: array.astype(dtype) for name, array in leaves.items()}
    return cast if kind == "array" else {name: torch.from_numpy(array) for name, array in cast.items()}


class Certificate:
    """One draw, what the plain loop makes of it, and the tolerances; rungs are then held to it one by one."""

    def __init__(self, sizes: LadderSizes, seed: int) -> None:
        self.sizes = sizes
        self.leaves = draw_leaves(sizes, seed)
        # Slopes are of one number, sum(output * cotangent). The cotangent is drawn: if it were all ones, errors of the
        # outputs could cancel. Its stream of random numbers, [seed, 1], is another than that of the leaves.
        self.cotangent = np.random.default_rng([seed, 1]).standard_normal(self.leaves["x"].shape)
        plain = RUNGS[0]
        began = time.perf_counter()
        self.steps = self._steps(plain)
        self.seconds = time.perf_counter() - began  # of a call of the scalar loops
        self.slopes = self._slopes(plain)
        self.tolerances = self._tolerances()

    def _tolerances(self) -> dict[str, float]:
        """For each stage and slope in float64 the largest difference that passes, and for the output as it is timed."""
        n = self.sizes
        # The most terms that a sum has: along the width, or, of the slope of a matrix, over all tokens.
        longest = max(n.d_model, n.batch * n.tokens)
        # One sum a stage. A slope has passed more, those of the way back, but most are shorter: the slopes of right
        # rungs stay below a fiftieth of what is tolerated.
        roundings = len(STAGES) * longest + ROUNDINGS
        # What is summed up may cancel, so that a small number carries the roundings of large ones: the largest number
        # of all stages sets the size for each stage, and the steepest slope for all slopes.
        largest = max(float(abs(step).max()) for step in self.steps.values())
        steepest = max(float(abs(slope).max()) for slope in self.slopes.values())
        # Two units of rounding: the rung's, in its dtype, and float64's, since the plain loop it is held against
        # rounds as often.
        relative = {dtype: (unit + UNIT["float64"]) * roundings for dtype, unit in UNIT.items()}
        tolerances = dict.fromkeys(self.steps, relative["float64"] * largest)
        tolerances |= dict.fromkeys(self.slopes, relative["float64"] * steepest)
        return tolerances | {f"timed {dtype}": most * largest for dtype, most in relative.items()}

    def certify(self, rung: Rung, parameters: int) -> LadderRung:
        """How far the rung is from the plain loop. `parameters` are those of the sizes that were asked for."""
        n, dtype = self.sizes, TIMED_DTYPE[rung.kind]
        result = LadderRung(rung.name, labelled("ladder", f"how {rung.name}"), dtype, parameters)
        if n.n_kv_heads != n.n_heads and not rung.grouped:
            refused = Note.of("ladder.cannot_share", n_kv_heads=n.n_kv_heads, n_heads=n.n_heads)
            return replace(result, refused=refused, not_timed=refused)
        steps = self._steps(rung)
        differences = {name: _difference(steps[name], self.steps[name]) for name in STAGES if name in steps}
        gradients = None
        if rung.kind != "array":  # NumPy has no gradients
            gradients = {name: _difference(slope, self.slopes[name]) for name, slope in self._slopes(rung).items()}
        leaves = cast_leaves(self.leaves, rung.kind, dtype)
        with torch.no_grad():
            output = rung.prepare(n, leaves)(leaves["x"], None)
        timed = _difference(_numbers(output), self.steps["output"])
        everything = differences | (gradients or {}) | {f"timed {dtype}": timed}
        wrong = [
            labelled("ladder", name) for name, far in everything.items() if far is None or far > self.tolerances[name]
        ]
        return replace(
            result,
            differences=differences,
            gradients=gradients,
            timed_difference=timed,
            agrees=not wrong,
            not_timed=Note.of("ladder.disagrees", steps=wrong) if wrong else None,
        )

    def _steps(self, rung: Rung) -> dict[str, Array]:
        """What a rung makes at each stage that it hands out, in the form of the plain loop."""
        n, leaves = self.sizes, cast_leaves(self.leaves, rung.kind, "float64")
        keep: Keep = {}
        with torch.no_grad():
            keep["output"] = rung.prepare(n, leaves)(leaves["x"], keep)
        steps = {name: _numbers(step) for name, step in keep.items()}
        # Where a query may not look, some rungs have -inf and others the score before the mask: neither counts.
        if "scores" in steps:
            steps["scores"] = np.where(np.tri(n.tokens, dtype=bool), steps["scores"], 0)
        for name in steps.keys() & {"k", "v"}:
            if steps[name].shape[1] == n.n_kv_heads:  # the plain loop has a copy for each query head
                steps[name] = steps[name].repeat(n.n_heads // n.n_kv_heads, axis=1)
        return steps

    def _slopes(self, rung: Rung) -> dict[str, Array]:
        """The slope of sum(output * cotangent) along every leaf, on the path that training takes."""
        if rung.kind == "tensor":
            leaves = cast_leaves(self.leaves, rung.kind, "float64")
            for leaf in leaves.values():
                leaf.requires_grad_()
            output = rung.prepare(self.sizes, leaves)(leaves["x"], None)
            (output * torch.from_numpy(self.cotangent)).sum().backward()
            return {name: _numbers(leaf.grad) for name, leaf in leaves.items()}
        # Arrays of objects: `vectorize` makes a Value of each number, and below takes the slope out of each.
        values = {name: np.vectorize(Value, otypes=[object])(array) for name, array in self.leaves.items()}
        leaves = {name: array.tolist() for name, array in values.items()}
        output = rung.prepare(self.sizes, leaves)(leaves["x"], None)
        loss = dot(output.ravel().tolist(), self.cotangent.ravel().tolist())
        assert isinstance(loss, Value)  # a dot product is one where a factor is one, and the leaves are
        loss.backward()
        return {name: np.vectorize(lambda value: value.grad, otypes=[float])(array) for name, array in values.items()}


def _numbers(step: Any) -> Array:
    """Lists, arrays and tensors as a float64 array."""
    return np.asarray(step.detach() if isinstance(step, Tensor) else step, np.float64)


def _difference(step: Array, expected: Array) -> float | None:
    """The largest absolute difference; None when the shapes differ or a number is not finite."""
    if step.shape != expected.shape:
        return None
    largest = float(abs(step - expected).max())
    return largest if math.isfinite(largest) else None


# All rungs: certificates, then prices.

Report = Callable[[str, int, int], None]  # is told what begins, how many tasks are done, how many there are

# The most multiplications, as `_work` counts them, for which a layer is certified at its own size: the plain loop and
# its slopes by scalar autograd then take up to half a second.
SCALAR_WORK = 600_000


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
    heads     query heads, a divisor of width
    kv_heads  key/value heads, a divisor of heads; default as many as heads
    tokens    of each document; the batch has `batch` of them
    repeats   timed calls of each rung, in turn, the median counts; fewer where they would take long
    seed      of the weights W_Q, W_K, W_V, W_O (standard normal times 1/sqrt(width)) and of x (standard normal)
    longest   seconds; the scalar loops are not timed when one call would take longer. A rung that is timed runs in
              fewer rounds where all its calls would
    report    is told what begins, how many tasks are done, and how many there are

    What is too large for the scalar loops is certified at a smaller size: see `certified` and `note`. Costs are of
    forward calls without gradients, in float32 (scalars: float64). HeadwiseError for sizes that do not fit.
    """
    sizes = LadderSizes(batch, tokens, width, heads, heads if kv_heads is None else kv_heads)
    _check(sizes, repeats, seed)
    small = certificate_sizes(sizes)
    total = len(RUNGS) + 1  # tasks: each rung is certified, then all that agree are timed together
    tell = report or (lambda text, done, total: None)
    results: dict[Rung, LadderRung] = {}
    calls: dict[Rung, Callable[[], object]] = {}
    with torch.random.fork_rng(devices=[]):  # the modules draw weights of their own before they are given these
        certificate = Certificate(small, seed)
        leaves = draw_leaves(sizes, seed)
        # About the seconds of a scalar call, by one at the small sizes.
        scalar_call = certificate.seconds * _work(sizes) / _work(small)
        for rung in RUNGS:
            tell(Note.of("ladder.certifies", rung=labelled("ladder", rung.name)), len(results), total)
            # The certificate is of the small sizes, the parameters are of those that were asked for.
            result = certificate.certify(rung, rung.parameters(sizes))
            if rung.kind == "plain" and scalar_call > longest:
                reason = Note.of("ladder.too_long", seconds=f"{scalar_call:.0f}", longest=f"{longest:g}")
                result = replace(result, not_timed=result.not_timed or reason)  # that it disagrees goes first
            elif result.agrees:
                arrays = cast_leaves(leaves, rung.kind, TIMED_DTYPE[rung.kind])
                calls[rung] = partial(rung.prepare(sizes, arrays), arrays["x"], None)
            results[rung] = result
    tell(Note.of("ladder.times_all"), len(RUNGS), total)
    times = in_turn(calls, repeats, longest)
    for rung, call in calls.items():
        ms = 1000 * statistics.median(times[rung])
        # After the times: what a first call loads is no peak of the rung.
        peak = peak_of(call) if rung.kind == "tensor" else _python_peak(call)
        results[rung] = replace(results[rung], ms=ms, repeats=len(times[rung]), peak_bytes=peak)
    tell(Note.of("ladder.done"), total, total)
    agree = all(result.agrees for result in results.values() if result.refused is None)
    note = None if small == sizes else Note.of("ladder.certified", sizes=small.note)
    threads = torch.get_num_threads()
    return Ladder(sizes, small, seed, threads, certificate.tolerances, tuple(results.values()), agree, note)


def _check(n: LadderSizes, repeats: int, seed: int) -> None:
    """Refuse sizes that are no counts, a seed that is none, and heads that do not divide evenly."""
    names = ("batch", "tokens", "width", "heads", "kv_heads", "repeats")  # the first five as LadderSizes has them
    for name, value in zip(names, (*vars(n).values(), repeats), strict=True):
        require_size(name, value)
    check_seed(seed)
    if n.d_model % n.n_heads:
        raise HeadwiseError(
            f"heads={n.n_heads} does not divide width={n.d_model}; pass a width that {n.n_heads} divides"
        )
    if n.n_heads % n.n_kv_heads:
        raise HeadwiseError(
            f"kv_heads={n.n_kv_heads} does not divide heads={n.n_heads}; query heads share in equal groups"
        )


def certificate_sizes(n: LadderSizes) -> LadderSizes:
    """The sizes themselves; where the scalar autograd would take too long, the least that tell all axes apart."""
    if _work(n) <= SCALAR_WORK:
        return n
    # 2 documents of 11 tokens, 3 key/value heads, 2 query heads a group, heads of 5: primes, all but the twos
    # different, so that swapped axes give another shape. Never more than is asked for.
    n_kv_heads, group = min(n.n_kv_heads, 3), min(n.n_heads // n.n_kv_heads, 2)
    n_heads, head_dim = n_kv_heads * group, min(n.head_dim, 5)
    return LadderSizes(min(n.batch, 2), min(n.tokens, 11), n_heads * head_dim, n_heads, n_kv_heads)


def _work(n: LadderSizes) -> int:
    """A scalar loop's multiplications; a place of the attention map, with its exponential, costs as many as 100.

    100 is rough: the seconds that this predicts are right within a factor of 3 or 4.
    """
    linear = 2 * n.d_model * (n.d_model + n.kv_width)  # of a token
    attention = n.tokens * (2 * n.d_model + 100 * n.n_heads)
    return n.batch * n.tokens * (linear + attention)


def _python_peak(call: Callable[[], object]) -> int:
    """The most bytes that Python and NumPy held at a time beyond what they had before; torch's are not among them."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
