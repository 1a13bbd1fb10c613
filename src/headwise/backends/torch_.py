"""The torch backend: the fused kernel wherever it gives the same answer, else every step spelled out.

Two paths share one preparation of the mask. `trace` and softcaps take the explicit path; all else goes to
`scaled_dot_product_attention`, with these moves, none of which changes the answer:

- windows and causal bounds first shorten K and V to the keys that some query sees;
- a causal bound that then has its corner on the diagonal becomes the kernel's own flag, and costs no mask;
- a window that is narrow beside the text is cut into blocks of queries, which read the keys of their windows alone;
- packed or padded documents go apart, each over its own keys, where that leaves out enough;
- one new query of a grouped layer is folded, (B,H,1,D) -> (B,G,r,D), so that K and V are read once a group;
- a sink is one more key, whose score comes from an extra feature of the queries and whose value is zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.backends import paths
from headwise.errors import HeadwiseError
from headwise.masks import BroadcastGrid, Mask, resolve
from headwise.positions import RoPE
from headwise.records import Trace
from headwise.spec import (
    Options,
    Sizes,
    by_group,
    check_dropout,
    check_floats,
    check_per_head,
    check_scores,
    check_shapes,
    is_adjacent,
    living_keys,
    resolve_kv_index,
)

# On fewer keys than a vector of the processor holds, the CPU kernel takes a row of NaN scores for one that may attend
# nothing, and gives 0; with a mask it does not. The longest vectors, of 512 bits, hold 16 numbers of float32.
FEW_KEYS = 16
WITHOUT_FLOAT64 = {"mps"}  # kinds of devices, by torch's names: Apple's


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """Multi-head attention of torch tensors, differentiable; see `headwise.attend`."""
    call = _Call(q, k, v, options)
    # Documents apart would make a graph for their lengths alone, and blocks an exported program for long texts alone.
    readable = None if torch.compiler.is_compiling() else call.grid
    blocks = not torch.compiler.is_exporting()
    path = paths.choose(call.sizes, options, readable, blocks)
    if path.name == paths.EXPLICIT:
        return _explicit(call, q, k, v).out
    if path.name == paths.APART:
        out = _apart(call, path, q, k, v)
    else:
        out = _together(call, path, call.grid, q, k, v)
    return out if call.gate_h11 is None else out * call.gate_h11.to(out.dtype)


def _together(
    call: _Call,
    path: paths.Path,
    grid: BroadcastGrid | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """One call of the kernel, with the tensor of all masks where there are some."""
    if path.name == paths.BLOCKS:
        return _in_blocks(call, path, q, *call.pick(k, v))
    k = k[:, :, path.keys]
    v = v[:, :, path.keys]
    causal = path.name == paths.CAUSAL
    # What the kernel's causal flag says no mask needs to say again.
    band = None if causal else path.band
    seen = _dense(grid, band, path.rest, call, path.keys)
    # in this order: `alive` is by key/value head, as K and V are before `pick`
    k, v = call.pick(*seen.protect(k, v))
    mask = seen.allowed
    if mask is not None and seen.rows is not None:
        # the kernel makes NaN of an empty row: it is opened here, and zeroed below
        mask = mask | ~seen.rows
    if seen.bias is not None:
        bias = seen.bias
        mask = bias if mask is None else torch.where(mask, bias, -math.inf)
    out = call.kernel(q, k, v, mask, causal)
    return out if seen.rows is None else torch.where(seen.rows, out, 0)


def _apart(call: _Call, path: paths.Path, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each document over its own keys, cut out by `split`: the gradient of a slice would be as long as the whole."""
    outs = []
    S = k.shape[2]
    counts = [n for n, _ in path.documents]
    groups = (torch.split(x, counts) for x in (q, k, v))
    for (n, stretches), q_n, k_n, v_n in zip(path.documents, *groups, strict=True):
        edges = sorted({0, S}.union(*[rows.keys for rows in stretches]))
        lengths = [stop - start for start, stop in pairwise(edges)]
        keys = dict(zip(edges, torch.split(k_n, lengths, 2), strict=False))
        values = dict(zip(edges, torch.split(v_n, lengths, 2), strict=False))
        q_parts = torch.split(q_n, [rows.n for rows in stretches], 2)
        parts = []
        for rows, q_p in zip(stretches, q_parts, strict=True):
            if not rows.path:
                part = q_p.new_zeros(*q_p.shape[:3], v.shape[3])
            else:
                k_p = keys[rows.keys[0]]
                v_p = values[rows.keys[0]]
                grid = _grid((n, q.shape[1], rows.n, k_p.shape[2]), q.device)
                part = _together(call, rows.path, grid, q_p, k_p, v_p)
            parts.append(part.transpose(1, 2))
        outs.append(torch.cat(parts, 1))
    # in the order in which the kernel writes: tokens before heads
    joined = outs[0] if len(outs) == 1 else torch.cat(outs)
    return joined.transpose(1, 2)


def _in_blocks(
    call: _Call, path: paths.Path, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Blocks of queries as the documents of one call, whose heads are those of all documents.

    Block n reads `width` keys, from key n * block + low on; zeros stand before the first key and behind the last.
    """
    assert path.band is not None
    k = k[:, :, path.keys]
    v = v[:, :, path.keys]
    low = path.band[0] - path.first
    high = path.band[1] - path.first
    (B, H, T, _), S, (block, width) = q.shape, k.shape[2], paths.block_of(low, high)
    n = -(-T // block)
    padding = (0, 0, -low, (n - 1) * block + width + low - S)
    k, v = (
        F.pad(x, padding)
        .unfold(2, width, block)  # (B,G,n,D,width), which copies nothing
        .permute(2, 0, 1, 4, 3)
        .flatten(1, 2)
        for x in (k, v)
    )
    # padding by 0 would be a copy
    q = q if n * block == T else F.pad(q, (0, 0, 0, n * block - T))
    blocks = q.reshape(B, H, n, block, -1)
    column = torch.arange(width, device=q.device)
    row = torch.arange(block, device=q.device)[:, None]
    key = torch.arange(n, device=q.device)[:, None, None] * block + low + column
    inside = (column >= row) & (column - row <= high - low)
    allowed = inside & (key >= 0) & (key < S)
    # what was added behind the last query may see nothing, and the kernel would make NaN of that
    allowed = allowed | ~allowed.any(-1, keepdim=True)
    out = call.kernel(
        blocks.permute(2, 0, 1, 3, 4).flatten(1, 2), k, v, allowed[:, None]
    )
    out = out.reshape(n, B, H, block, -1).permute(1, 2, 0, 3, 4)
    return out.flatten(2, 3)[:, :, :T]


def trace(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Trace[Tensor]:
    """As `attend`, with every step kept, in float32 or wider (`out` in the input's dtype). Always the explicit path."""
    return _explicit(_Call(q, k, v, options), q, k, v)


def _explicit(call: _Call, q: Tensor, k: Tensor, v: Tensor) -> Trace[Tensor]:
    options = call.options
    mask = options.mask
    softcap = options.softcap
    dropout = options.dropout
    # All keys and no band: every mask speaks for itself, as nothing is cut away.
    seen = _dense(
        call.grid, None, () if mask is None else mask.parts(), call, slice(None)
    )
    k, v = call.pick(*seen.protect(k, v))
    scores = by_group(q.to(call.dtype) * call.scale, k.to(call.dtype).transpose(-1, -2))
    capped = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    masked = capped if seen.bias is None else capped + seen.bias
    if seen.allowed is not None:
        masked = masked.masked_fill(~seen.allowed, -math.inf)
    weights, lse = _softmax(masked, call.sink_h11)
    # The layer passes dropout=0 outside of training, so F.dropout is never told of a mode.
    kept = F.dropout(weights, dropout) if dropout else weights
    out = by_group(kept, v.to(call.dtype))
    if call.gate_h11 is not None:
        out = out * call.gate_h11
    return Trace(scores, capped, masked, weights, lse, out.to(q.dtype))


class _Call:
    """The checked arguments of a call, in the forms that both paths use."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> None:
        if any(x.is_nested for x in (q, k, v)):
            raise HeadwiseError(
                "a nested tensor has texts of several lengths; pad it (torch.nested.to_padded_tensor) and pass the "
                "lengths as mask=Lengths(lengths)"
            )
        sizes = check_shapes(q.shape, k.shape, v.shape)
        check_scores(options.scale, options.softcap)
        check_dropout(options.dropout)
        check_floats(q, k, v, ".float()")
        if not q.device == k.device == v.device:
            raise HeadwiseError(
                f"devices differ: q is on {q.device}, k on {k.device}, v on {v.device}; move them to one"
            )
        self.sizes = sizes
        self.options = options
        self.index = resolve_kv_index(sizes.H, sizes.G, options.kv_index)
        # of all steps: float32 or wider
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.scale = (
            1 / math.sqrt(sizes.D) if options.scale is None else float(options.scale)
        )
        self.sink_h11 = _per_head("sink", options.sink, sizes.H, self.dtype, q.device)
        self.gate_h11 = _per_head("gate", options.gate, sizes.H, self.dtype, q.device)
        # Without kv_index groups are adjacent by rule, which need not be found out at every token that is decoded.
        self._grouped = options.kv_index is None or is_adjacent(
            self.index, sizes.H, sizes.G
        )
        self.grid = checked_grid(options.mask, sizes, q.device)

    def pick(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """K and V whose heads serve equal, adjacent groups of query heads: as they are, or picked by kv_index."""
        if self._grouped:
            return k, v
        return k[:, list(self.index)], v[:, list(self.index)]

    def kernel(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """One call of torch's fused attention: (B,H,T,E). The mask is bool or added; no row of it is empty."""
        B, H, T, _ = q.shape
        G = k.shape[1]
        width = v.shape[-1]
        dtype = q.dtype
        if self.sink_h11 is not None:
            # half precision would round the sink to 8 or 11 bits
            q, k, v = (x.to(self.dtype) for x in (q, k, v))
            # blocks have the heads of all documents
            sink = self.sink_h11.flatten().repeat(H // self.sizes.H)
            q, k, v, mask = _sink_as_key(q, k, v, mask, sink, self.scale)
        # fused kernels want head width and value width equal
        wider = max(q.shape[-1], v.shape[-1])
        q, k, v = (
            # zeros at the end change no product; those of values are cut off the output again
            x if x.shape[-1] == wider else F.pad(x, (0, wider - x.shape[-1]))
            for x in (q, k, v)
        )
        # The CPU kernel takes a mask of float32 beside narrower queries; kernels of other devices want one dtype.
        if mask is not None and mask.dtype != torch.bool and q.device.type != "cpu":
            mask = mask.to(q.dtype)
        # added at the end, it brings back the NaN that FEW_KEYS speaks of
        zero_or_nan = None
        # A compiler does not compare the length, or it would make two graphs.
        is_short = torch.compiler.is_compiling() or k.shape[2] < FEW_KEYS
        if mask is None and is_short and q.device.type == "cpu":
            zero_or_nan = _zero_or_nan(q, k, causal)
        # The heads of a group take the place of the queries: K and V are read once a group. A single query never has
        # the causal flag.
        if T == 1 and G < H:
            q = q.reshape(B, G, H // G, q.shape[-1])
            if mask is not None and mask.shape[1] == H:
                mask = mask.reshape(mask.shape[0], G, H // G, mask.shape[3])
        # heads that share K and V and are not folded; a bool, even of symbols
        has_groups = bool(q.shape[1] != G)
        with self._in_its_dtype(q):
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                mask,
                self.options.dropout,
                causal,
                scale=self.scale,
                enable_gqa=has_groups,
            )
        out = out.reshape(B, H, T, -1)[..., :width]
        out = out if out.dtype == dtype else out.to(dtype)
        return out if zero_or_nan is None else out + zero_or_nan

    def _in_its_dtype(self, q: Tensor) -> AbstractContextManager[Any]:
        """Around the kernel: autocast would round the sink, and make infinity of a large one."""
        kind = q.device.type
        if self.sink_h11 is None or not torch.amp.is_autocast_available(kind):
            return nullcontext()
        return torch.autocast(kind, enabled=False)


class _Seen(NamedTuple):
    """Who sees whom, over the keys at hand. Each is None where it would say "all" or "nothing to add".

    An axis of length 1, such as the B|1 below, stands for the same answer all along it.
    """

    allowed: Tensor | None = None  # (B|1, H|1, T|1, S|1) bool, True = may attend
    bias: Tensor | None = None  # (B|1, H|1, T|1, S|1) in the working dtype, finite
    rows: Tensor | None = (
        None  # (B|1, H|1, T|1, 1) bool, queries that may attend something
    )
    alive: Tensor | None = (
        None  # (B|1, G|1, S|1, 1) bool, keys that some query may attend
    )

    def protect(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """K and V with zeros where nobody may attend: what stands there, NaN too, cannot leak."""
        if self.alive is None:
            return k, v
        return torch.where(self.alive, k, 0), torch.where(self.alive, v, 0)


def _grid(lengths: tuple[int, int, int, int], device: torch.device) -> BroadcastGrid:
    return BroadcastGrid(
        lengths,
        array=lambda values: as_tensor(values, device),
        arange=lambda n: torch.arange(n, device=device),
        known=_readable,
    )


def checked_grid(
    mask: Mask | None, sizes: Sizes, device: torch.device
) -> BroadcastGrid | None:
    """The grid of a whole call, which its mask fits; None without a mask."""
    if mask is None:
        return None
    grid = _grid((sizes.B, sizes.H, sizes.T, sizes.S), device)
    mask.check(grid)
    return grid


def _dense(
    grid: BroadcastGrid | None,
    band: paths.Band | None,
    rest: Sequence[Mask],
    call: _Call,
    keys: slice,
) -> _Seen:
    """A checked mask as tensors over these keys, from what it has become: a band, and the `rest`, the other masks."""
    # len: the compiler knows no truth of a tuple of masks
    if not grid or (not band and len(rest) == 0):
        return _Seen()
    grid = grid.of_keys(keys)
    dtype = call.dtype
    # `resolve` looks for -inf in the dtype of all steps, and returns the bias as the masks gave it.
    allowed, bias = resolve(rest, grid, torch.where, lambda bias: bias.to(dtype))
    bias = None if bias is None else _four_axes(bias).to(dtype)
    read_by_all = allowed is None
    low = 1
    high = 0
    if band is not None:
        low, high = band
        # of `j - i`, each pair would take eight bytes
        inside = (grid.j >= grid.i + low) & (grid.j <= grid.i + high)
        allowed = inside if allowed is None else allowed & inside
    if allowed is None:
        return _Seen(bias=bias)
    allowed = _four_axes(allowed)
    # Without other masks some query sees each key at hand, for `paths` cut off the others; unless low > high, as where
    # two windows exclude each other: then nobody sees anything.
    rows = alive = None
    if not read_by_all or low > high:
        alive = living_keys(allowed, call.index, call.sizes, torch.stack)
    if alive is not None or paths.runs_off((low, high), grid.T, grid.S):
        rows = allowed.any(-1, keepdim=True)
    return _Seen(allowed, bias, rows, alive)


def _zero_or_nan(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """(B,H,T,1): NaN for each query that holds NaN or inf, or sees a key that holds NaN; 0 for the others."""
    # NaN or inf times 0 is NaN, and all else 0. Inf counts, too, for its score with a key that holds 0 is NaN. (Where
    # it makes every score -inf, the explicit path differs: it takes the row for an empty one, and gives 0.)
    of_queries = (q * 0).sum(-1, keepdim=True)
    nan_keys = k.isnan().any(-1)  # (B,G,S)
    # Under the causal flag T is S and query i sees keys 0 to i: place i of the running count is for query i, (B,G,T).
    # Without the flag (and without a mask, see the caller) each query sees all keys: (B,G,1).
    sees_nan = nan_keys.cumsum(-1) > 0 if causal else nan_keys.any(-1, keepdim=True)
    sees_nan = sees_nan.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return of_queries.masked_fill(sees_nan[..., None], math.nan)


def _sink_as_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sink_h: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The sink as a last key: queries get one more feature, whose product with this key's number is sink / scale.

    With D being the width before:

                        D           1
        queries     q           |  sink / scale
        keys        k           |  0
        the sink    0           |  1            the last key; its value is 0

    A feature times a key's zero must be zero, and the kernel must not overflow, so an infinite sink becomes a large
    one.
    """
    # The kernel scales the sum of a score's products, the sink's among them: a quarter leaves them room.
    most = torch.finfo(q.dtype).max / (4 * max(1.0, abs(scale)))
    # `scale` is not near 0: `paths.why_explicit` keeps such calls away.
    feature_h11 = (sink_h / scale).clamp(-most, most)[:, None, None]
    q = torch.cat([q, feature_h11.expand(q.shape[0], -1, q.shape[2], 1)], -1)
    sink_key = F.pad(k.new_ones(1), (k.shape[-1], 0)).expand(*k.shape[:2], 1, -1)
    k = torch.cat([F.pad(k, (0, 1)), sink_key], 2)
    v = F.pad(v, (0, 0, 0, 1))
    if mask is not None:
        # Expanded first: a mask of one column for all keys must not get a second one.
        mask = mask.expand(*mask.shape[:3], k.shape[2] - 1)
        mask = F.pad(mask, (0, 1), value=mask.dtype == torch.bool)
    return q, k, v, mask


def _softmax(masked_bhts: Tensor, sink_h11: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights (B,H,T,S) and the log-sum-exp of scores and sink (B,H,T).

    A row of -inf gives zeros and -inf, and zero gradients. The sink is one more logit, whose weight is left out.
    """
    if masked_bhts.shape[-1] == 0:  # no keys: `amax` of nothing is an error
        return masked_bhts, masked_bhts.new_full(masked_bhts.shape[:-1], -math.inf)
    numbers = torch.finfo(masked_bhts.dtype)
    # Taken off before exp, so that nothing overflows. It cancels in the ratio, and so needs no gradient.
    top = masked_bhts.detach().amax(-1, keepdim=True)
    empty = top == -math.inf
    if sink_h11 is not None:
        sink_h11 = sink_h11.clamp(max=numbers.max)
        top = torch.maximum(top, sink_h11.detach())
    top = top.clamp(min=numbers.min)  # inf - inf and -inf - -inf would be NaN
    powers = torch.exp(masked_bhts - top)
    total = powers.sum(-1, keepdim=True)
    if sink_h11 is not None:
        total = total + torch.exp(sink_h11 - top)
    total = total.clamp(min=1)  # as it is but in an empty row: 0 / 1, not 0 / 0
    lse = (torch.log(total) + top).masked_fill(empty, -math.inf)
    return powers / total, lse[..., 0]


def _per_head(
    name: str, values: Any, n_heads: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """sink or gate as (H,1,1)."""
    if values is None:
        return None
    tensor = as_tensor(values, device).to(dtype)
    check_per_head(name, tensor.shape, n_heads)
    return tensor.reshape(n_heads, 1, 1)


def widest(device: torch.device) -> torch.dtype:
    """The format of sums on a device: float64 where there is such a thing."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def as_tensor(values: Any, device: torch.device) -> Tensor:
    """Lists keep Python's double precision, where the device has it; arrays and tensors theirs."""
    if not isinstance(values, Tensor):
        # torch alone would make float32 of a list. A copy: torch warns of arrays that are read-only, and refuses
        # those with negative strides.
        values = torch.from_numpy(np.array(values))
    dtype = widest(device) if values.dtype == torch.float64 else values.dtype
    return values.to(device, dtype)


def _readable(values: Any) -> bool:
    """Can numbers be looked at? Not while torch traces a graph or maps over an axis, nor on the meta device."""
    if not isinstance(values, Tensor):
        return True
    is_mapped = torch._C._functorch.is_functorch_wrapped_tensor(values)
    return not (
        is_mapped or torch.compiler.is_compiling() or values.device.type == "meta"
    )


def _four_axes(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.ndim)]


class Rotation:
    """Rotates the features of queries and keys by angles that grow with the position.

    Cosines and sines are kept in float32 for as many positions as were asked for so far, whatever the model's dtype.

    rope      the angles, and `dim`, how many features are rotated (all of them where it is None)
    head_dim  how many features may be rotated
    last      rotate the last `dim` features, and not the first
    """

    def __init__(self, rope: RoPE, head_dim: int, last: bool = False) -> None:
        self.rope = rope
        self.last = last
        self.dim = rope.dim or head_dim
        # YaRN multiplies cosines and sines by a factor
        self.frequencies, self.factor = rope.frequencies(head_dim)
        # cosines and sines, by position
        self._table = torch.empty(2, 0, self.dim // 2)

    def __call__(
        self, x_bhtd: Tensor, start: int, positions: Tensor | None = None
    ) -> Tensor:
        """x (B,H,T,D) rotated; position of the first token `start`, or `positions` (T,) or (B,T) of all."""
        cos, sin = self._angles(x_bhtd, start, positions).unbind()
        edge = -self.dim if self.last else self.dim
        parts = list(x_bhtd.tensor_split([edge], -1))
        x = parts[self.last]
        is_interleaved = self.rope.interleaved
        a, b = (x[..., 0::2], x[..., 1::2]) if is_interleaved else x.chunk(2, -1)
        both = [a * cos - b * sin, b * cos + a * sin]
        turned = (
            torch.stack(both, -1).flatten(-2) if is_interleaved else torch.cat(both, -1)
        )
        parts[self.last] = turned.to(x_bhtd.dtype)
        is_whole = self.dim == x_bhtd.shape[-1]
        return parts[self.last] if is_whole else torch.cat(parts, -1)

    def _angles(self, x_bhtd: Tensor, start: int, positions: Tensor | None) -> Tensor:
        """Cosines and sines, (2, T, dim/2) or (2, B, 1, T, dim/2)."""
        device = x_bhtd.device
        end = start + x_bhtd.shape[2]
        if positions is not None:
            angles = self._cos_sin(positions.to(device))
            return angles[:, :, None] if positions.ndim == 2 else angles
        # A table kept while torch traces would hold symbols, and its size would be a reason to compile again.
        # A subclass of Tensor stands for such symbols.
        if type(x_bhtd) is not Tensor or torch.compiler.is_compiling():
            return self._cos_sin(torch.arange(start, end, device=device))
        table = self._table
        if table.shape[1] < end or table.device != device:
            # twice as long: a text that grows by a token makes few tables
            length = max(end, 2 * table.shape[1])
            table = self._cos_sin(torch.arange(length, device=device))
            self._table = table
        return table[:, start:end]

    def _cos_sin(self, positions: Tensor) -> Tensor:
        """Cosines and sines of these positions in float32, (2, ..., dim/2), by way of float64.

        At position 100,000 an angle in float32 would be off by 0.004.
        """
        # the table outlives the call, and must serve training later
        with torch.inference_mode(False):
            device = positions.device
            # Without float64 on the device the CPU does it. A clone: a tensor of an inference block may not enter.
            if widest(device) != torch.float64:
                positions = positions.cpu()
            frequencies = torch.tensor(
                self.frequencies, dtype=torch.float64, device=positions.device
            )
            angles = positions.clone()[..., None].double() * frequencies
            both = torch.stack([angles.cos(), angles.sin()]) * self.factor
            return both.float().to(device)
