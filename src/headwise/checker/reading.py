"""Where a learner's object keeps W_Q, W_K, W_V and W_O, told by names and shapes; and how they can be read.

A `Reading` is one hypothesis on how correct code may use these weights: layouts of heads, orders of a fused matrix, the
side on which a matrix is multiplied, q and k exchanged. Code that any reading reproduces is correct.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headwise.checker.bugs import Settings, UncheckedError
from headwise.checker.contract import (
    BATCH,
    CALL,
    HEAD_DIM,
    HEADS,
    NAMES,
    TOKENS,
    VALUES,
    WIDTH,
    WINDOW,
    Config,
    Target,
    arguments_of,
    meaning_of,
    parameters_of,
    to_array,
    unwrapped,
)
from headwise.checker.form import Weights
from headwise.checker.lent import LENT, Unturned, unchanged
from headwise.checker.source import Stub
from headwise.masks import alibi_slopes

# Role -> the pattern of a whole name, from parts in names.toml: "wq", "qproj" and "toqueries" are q. The first
# role that fits counts.
ROLES = {
    role: re.compile(
        f"{NAMES['weights']['stem']}(?:{NAMES['weights'][role]}){NAMES['weights']['tail']}"
    )
    for role in ("qkv", "kv", "q", "k", "v", "o")
}
# What says that rotary positions are used: calls and products. A parameter `cos` alone may be left aside by the code.
ROTATES = (
    r"(rope|rotary|rotat)\w*\(|\bcos\w*\(|\* ?\(?\w*(cos|freqs)|(cos|freqs)\w*(\[[^]]*\])? \*|"
    r"view_as_complex|1j|inv_freq"
)
ROTATES_PART = (
    # of a head's features
    r"partial|pct|percent|(rotary|rope|rot)_?(n?dims?|fraction|width)|\[\.\.\., :self\.\w+\]"
)
# of its features that models rotate: all, half as GLM, a quarter as GPT-NeoX
FRACTIONS = (1, 0.5, 0.25)
# What says that code may add its input to what comes out.
RESIDUAL = (
    r"residual|return (?![^\n]*(cos|sin))[^\n]*\+|"
    r"\+ ?(x|inputs?\w*|quer\w+|q|hidden\w*)\b|\b(x|h|inputs?|q|quer\w+) \+"
)
# Of a path: "b", "b_q", "bq", "q_bias", "sesgo". It decides where two axes leave open whether an array is a bias.
_BIAS = re.compile(r"(^|_|\.)b(ias)?(_|$|\.)|^b[qkvo]$|bias|beta|sesgo", re.I)
# A norm of queries or keys, or of what may stand for them; not that of the text, nor a norm that is built.
NORMED = (
    r"(?<!self)\.norm\(|norm\w*, \(|norm\w*\((?![xhydcne]\b)[a-z]\b|"
    r"norm\w*\([^,)]*\b(w?[qk]|to_[qk]|[qk]_\w+|\w+_[qk]|quer\w*|keys?)\b"
)
# numbers of an array: what has more waits for keys and values, or is too slow. A round choice
LARGEST = 10**7
_NORM = re.compile(r"norm|(^|\.)ln|_ln\b", re.I)  # of a path: "q_norm", "ln_q", "q_ln"


@dataclass(frozen=True)
class Array:
    """One array of floats that an object holds."""

    path: str  # attributes that lead to it: ".heads.0.query.weight"
    value: Any  # its numbers, as a NumPy array
    linear: bool = False  # is it the `weight` of an nn.Linear, which is (out, in)?
    holder: Any = None  # the tensor or array itself, to write new numbers into


@dataclass
class Parts:
    """The arrays of a layer by role: each role has one matrix, or one for each head."""

    weights: dict[str, list[Array]] = field(
        default_factory=dict
    )  # by q, k, v, o, qkv or kv
    biases: dict[str, list[Array]] = field(default_factory=dict)
    gains: dict[str, Array] = field(
        default_factory=dict
    )  # of norms on queries and keys: by q, k
    same_head: bool = False  # one module stands in the list of heads several times
    rotated: float = (
        0.0  # how much of a head's features, where matrices of their own make those
    )
    sink: Any = None  # (h,)
    # bias and matrix, (h*e,) and (C,h*e) or (h,) and (C,h); a bias of 0 where there is none
    gate: list[Any] = field(default_factory=lambda: [0.0, None])
    unread: list[Array] = field(default_factory=list)  # of a role that nothing tells


@dataclass(frozen=True)
class Reading:
    """Weights in our convention, and the settings of `form.py` under which correct code of this style computes."""

    weights: Weights
    settings: Settings = field(default_factory=dict)
    structural: tuple[str, ...] = ()  # bugs that the shapes alone show


def arrays_of(target: Any) -> list[Array]:
    """Every array of floats that an object holds, in the order in which it was made."""
    arrays: list[Array] = []
    seen: set[int] = set()

    def visit(value: Any, path: str, linear: bool) -> None:
        value = unwrapped(value)
        # no layer is that deep, and objects may hold one another
        is_deep = path.count(".") > 6
        if is_deep or id(value) in seen or isinstance(value, Stub):
            return
        seen.add(id(value))  # shared weights count once
        numbers = _numbers_of(value)
        if numbers is None:
            is_linear = hasattr(value, "in_features") and hasattr(value, "out_features")
            # a convolution of one place is a matrix, too
            is_linear |= {*getattr(value, "kernel_size", ())} == {1}
            for name, item in _children(value):
                visit(item, f"{path}.{name}", is_linear and name == "weight")
        elif (
            numbers.dtype.kind == "f" and numbers.size > 1
        ):  # a single number is a scale
            if linear:
                numbers = numbers.reshape(numbers.shape[:2])
            if numbers.ndim > 3:  # (h,1,C,d) or (1,h,C,d)
                numbers = numbers.squeeze()
            arrays.append(Array(path, numbers, linear, value))

    visit(target, "", False)
    # beside weights that are drawn an array of zeros waits for keys and values, and one of two numbers is a mask
    drawn = [array for array in arrays if not _waits(array)]
    return drawn if len(drawn) >= 2 else arrays


def _waits(array: Array) -> bool:
    """Is it a mask, which has two numbers, or infinite ones; or one of NumPy's that waits for keys and values?"""
    if np.isnan(array.value).any():  # memory that nothing was written into yet
        return False
    if np.isinf(array.value).any():
        return True
    if array.value.ndim < 2 or getattr(array.holder, "requires_grad", False):
        return False
    several = len(np.unique(array.value))
    return several == 2 or (several == 1 and isinstance(array.holder, np.ndarray))


def _numbers_of(value: Any) -> Any:
    """A tensor, an array or a matrix of lists as an array; None for what is none, such as a plain list of numbers."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach") and value.numel() < LARGEST:
        value = value.detach().cpu()
        return value.double().numpy() if value.is_floating_point() else value.numpy()
    if isinstance(value, list | tuple) and value and not hasattr(value[0], "shape"):
        # A ragged list raises ValueError, one of other things TypeError, one of tensors with gradients RuntimeError.
        with contextlib.suppress(ValueError, TypeError, RuntimeError):
            rows = value
            if isinstance(value[0], list):  # perhaps of the file's own numbers
                rows = [[getattr(x, "data", x) for x in row] for row in value]
            numbers = np.array(rows, dtype=float)
            return numbers if numbers.ndim >= 2 else None
    return None


def _children(value: Any) -> Any:
    """Pairs of a name and what an object holds there; of a torch module no buffers, which hold masks and tables."""
    if isinstance(value, list | tuple):
        return enumerate(value)
    if isinstance(value, dict):
        return value.items()
    # a number or text, or a function
    if not hasattr(value, "__dict__") or hasattr(value, "__code__"):
        return ()
    kept = vars(value)
    if not hasattr(value, "named_parameters"):
        return kept.items()
    # torch's own attributes begin with "_"; numbers of a config are no weights.
    public = {
        name: kept[name]
        for name in kept
        if not re.match("_|(training|config|cfg)$", name)
    }
    return {**value._parameters, **value._modules, **public}.items()


def to_eval(module: Any, depth: int = 4) -> None:
    """Out of training: by the object's own method, or by the attribute that its parts read."""
    if hasattr(module, "eval"):
        module.eval()
        return
    if getattr(module, "training", False) is True:
        module.training = False
    if depth and not hasattr(module, "detach"):
        for _, part in _children(module):
            to_eval(part, depth - 1)


def role_of(path: str) -> str | None:
    """q, k, v, o, qkv or kv, by the last part of a path that names a role; a name of W_O counts where no other does."""
    role = None
    # "attn.q_proj.weight": the last parts are the most exact
    for part in reversed(path.lower().split(".")):
        plain = re.sub(r"[^a-z]", "", re.sub("^w_?0$", "wo", part))
        # The pattern of a role matches some words that tell none by themselves.
        if plain in ("weight", "weights", "bias", "b", "w", "attn", "attention"):
            continue
        for name, pattern in ROLES.items():
            if pattern.match(plain):
                if name != "o":
                    return name
                role = role or name
                break
    return role


def roles_of(names: Collection[str]) -> dict[str, str]:
    """Those of the names that tell a role, with it."""
    return {name: role for name in names if (role := role_of(name))}


def are_all(roles: Collection[str]) -> bool:
    """Are queries, keys and values among them, by themselves or in one?"""
    whole = ({"q", "k", "v"}, {"q", "kv"}, {"qkv"})
    return any(each <= {*roles} for each in whole)


def parts_of(target: Any, mapping: Mapping[str, str]) -> Parts:
    """The arrays of an object by role; `mapping` has the names of attributes whose role no name tells.

    Where W_O is all there is, queries, keys and values are projected outside: their matrices are identities.
    """
    parts = Parts(same_head=_is_one_module(target))
    # `named` has every path and each of its parts, by which `mapping` may name an array; `paths` are for the error.
    named = set[str]()
    paths = list[str]()
    others: list[Array] = []
    for array in arrays_of(target):
        path = array.path.strip(".")
        paths.append(path)
        named |= {path, *path.split(".")}
        flat = array.value.ndim == 1
        if array.value.ndim > 2 and {BATCH, TOKENS} <= {*array.value.shape}:
            continue  # what a call of a batch left behind
        if _stands_beside(parts, array, path):
            continue
        role = role_of(path)
        for wanted, name in mapping.items():
            if name in (path, *path.split(".")):
                role = wanted
        if role is None:
            others.append(array)
        else:
            # A bias may have an axis of heads: b_q (h,d), or (h,d,1).
            is_bias = flat or (not array.linear and _BIAS.search(path))
            held = parts.biases if is_bias else parts.weights
            held.setdefault(role, []).append(array)
    for wanted, name in mapping.items():
        if name not in named:
            raise UncheckedError(
                "no_weight", wanted=wanted, name=name, names=", ".join(paths)
            )
    _give_by_place(parts)
    kept = getattr(target, "__dict__", {})
    counts = {meaning_of(x): kept[x] for x in kept if type(kept[x]) is int}
    told = [x.get("n_heads") for x in kept.values() if isinstance(x, Config)]
    heads = counts.get("HEADS") or next(iter(told), None)
    _add_unnamed(parts, _without_latent(parts, others, heads))
    if list(parts.weights) == ["o"] and not (parts.unread or parts.same_head):
        identity = np.eye(_in_out(parts.weights["o"][0]).shape[0])
        parts.weights |= {role: [Array("", identity)] for role in "qkv"}
    return parts


def _stands_beside(parts: Parts, array: Array, path: str) -> bool:
    """Is it no projection, but of a norm, a sink or a gate? Then `parts` get it as such."""
    flat = array.value.ndim == 1
    if _NORM.search(path):
        # its gain counts where its name says q or k: "q_norm", "norm_q", "query_norm"
        side = re.search(r"(?<![a-z])(q|k)", path)
        # The bias of a LayerNorm, of which the form has none, takes the place of its gain: no reading fits then.
        if side:
            parts.gains[side[1]] = array
        return True
    if re.search("sink", path) and array.value.size > 1:
        parts.sink = array.value.ravel()
        return True
    is_gate = re.search(r"(?<![a-z])gate|(^|\.)w?_?g(_proj)?(\.|$)", path)
    if is_gate and (flat or WIDTH in array.value.shape):
        parts.gate[not flat] = array.value if flat else _in_out(array)
        return True
    return False


def _give_by_place(parts: Parts) -> None:
    """Roles of matrices that are told by what stands beside them: of a shared one, of three in one, of a list."""
    if parts.same_head and [len(x) for x in parts.weights.values()] == [1]:
        # one matrix stands in the places of all
        parts.weights = {role: next(iter(parts.weights.values())) for role in "qkvo"}
        parts.biases = {
            role: next(iter(parts.biases.values())) for role in "qkvo" if parts.biases
        }
    is_without = not {"q", "qkv"} & set(parts.weights)
    for array in parts.weights.get("o", []) if is_without else ():
        shape = _in_out(array).shape
        if len(shape) == 2 and shape[1] == 3 * shape[0]:
            # `linear`: three times as many features come out
            module = array.path.rpartition(".")[0]
            for held in (parts.weights, parts.biases):
                moved = [x for x in held["o"] if x.path.startswith(f"{module}.")]
                held["o"] = [x for x in held["o"] if x not in moved]
                held["qkv"] = moved
    if is_without and len(parts.weights.get("o", ())) in (3, 4):
        # `linears`, `projections`: a list without names, W_Q, W_K, W_V, W_O in this order, or the first three of them
        for arrays in (parts.weights, parts.biases):
            arrays.update(
                {
                    role: [array]
                    for role, array in zip("qkvo", arrays.pop("o", []), strict=False)
                }
            )


# Names of the matrices of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): down to what queries, or keys
# and values, are made of; up to each of them; and the features that are rotated, of a key the same for all heads.
_DOWN = r"(a|d|down|to|compr\w*|latent)?"
_UP = r"(b|u|up|expand\w?|decompr\w*)?"
LATENT = {
    "dkv": rf"w?{_DOWN}kv{_DOWN}(withmqa)?|w?dwk|down|compr\w*|latent",
    "ukv": "w?(b|u|up)kv|w?kv(b|u|up)",  # of keys and values, head by head
    "dq": "w?(dq|q(a|d|down|compr\\w*|latent)|downq)",
    "q": rf"w?{_UP}q{_UP}(c|content|nope)?",
    "k": rf"w?{_UP}k{_UP}(c|content|nope)?",
    "v": rf"w?{_UP}v{_UP}(c|content)?",
    "qr": "w?(q|uq|qup)(r|rope|rotary)",
    "kr": "w?(k|uk|kup)(r|rope|rotary)",
}


def _without_latent(
    parts: Parts, others: list[Array], heads: int | None
) -> list[Array]:
    """What is left of unnamed matrices once queries, keys and values that are made of latents have one matrix each.

    heads  as the object tells; None where it does not
    """
    named: dict[str, list[Array]] = {}
    told = [
        array for role in ("kv", "q", "k", "v") for array in parts.weights.get(role, ())
    ]
    for array in (*others, *told):
        plain = re.sub("[^a-z]|weight|proj|linear", "", array.path.lower())
        for key, pattern in LATENT.items():
            if array.value.ndim == 2 and re.fullmatch(pattern, plain):
                named.setdefault(key, []).append(array)
    has_both = {"k", "v"} <= named.keys() or {"q", "ukv"} <= named.keys()
    if "dkv" not in named or not has_both:
        return others
    # Each as (C+1,h*d), the bias as one more row: one matrix, or one for each head beside another.
    biases = [*others, *itertools.chain.from_iterable(parts.biases.values())]
    whole = {}
    for key, arrays in named.items():
        whole[key] = np.concatenate([_with_bias(x, biases) for x in arrays], 1)
    if "ukv" in whole and heads:
        # behind the latents the key's part that is turned
        named["k"] = named["v"] = named["ukv"]
        rank = len(whole["ukv"]) - 1
        whole["kr"] = whole["dkv"][:, rank:]
        whole["dkv"] = whole["dkv"][:, :rank]
        content = whole["q"].shape[1] // heads - whole["kr"].shape[1]
        whole["q"], whole["qr"] = _cut(whole["q"], heads, content)
        whole["k"], whole["v"] = _cut(whole.pop("ukv"), heads, content)
    latents = {"q": "dq", "qr": "dq", "k": "dkv", "v": "dkv", "kr": "dkv"}
    for key in latents.keys() & whole:
        down = whole.get(latents[key])
        if down is not None and len(whole[key]) == down.shape[1] + 1:
            last = np.eye(len(down))[:, -1:]
            whole[key] = np.concatenate([down, last], 1) @ whole[key]
    if len({len(matrix) for matrix in whole.values()}) > 1:
        return others
    if {"q", "qr", "kr"} <= set(whole):
        # a key's part may be the same for all heads, and then tells its width
        turned = {"q": whole["qr"], "k": whole["kr"]}
        heads = heads or whole["qr"].shape[1] // whole["kr"].shape[1]
        for role, matrix in turned.items():
            content = whole[role].reshape(len(matrix), heads, -1)
            rotated = whole["qr"].shape[1] // heads
            matrix = matrix.reshape(len(matrix), -1, rotated)
            matrix = np.broadcast_to(matrix, (len(matrix), heads, rotated))
            # the form turns the first features of a head
            joined = np.concatenate([matrix, content], -1)
            whole[role] = joined.reshape(len(matrix), -1)
            parts.rotated = rotated / joined.shape[-1]
    parts.weights.pop("kv", None)
    for role in {*"qkv"} & set(whole):
        *rows, bias = whole[role]
        first = replace(named[role][0], linear=False)
        parts.weights[role] = [replace(first, value=np.array(rows))]
        parts.biases[role] = [replace(first, value=bias)]
    known = {id(array) for arrays in named.values() for array in arrays}
    return [array for array in others if id(array) not in known]


def _cut(matrix: Any, heads: int, first: int) -> tuple[Any, Any]:
    """Of (C,h*d) the `first` features of each head, and the others."""
    parts = matrix.reshape(len(matrix), heads, -1)
    cut = parts[..., :first], parts[..., first:]
    return tuple(part.reshape(len(matrix), -1) for part in cut)


def _with_bias(array: Array, biases: list[Array]) -> Any:
    """The matrix (C,n) with the bias of its module, or zeros, as one more row."""
    path = f"{array.path.rpartition('.')[0]}.bias"
    value = _in_out(array)
    bias = next((x.value for x in biases if x.path == path), np.zeros(value.shape[1]))
    return np.vstack([value, bias])


def _in_out(array: Array) -> Any:
    return array.value.T if array.linear else array.value


def _add_unnamed(parts: Parts, others: list[Array]) -> None:
    """Matrices without a role get one that is missing: by a word of their names, or where one shape alone allows it."""
    weights = parts.weights
    left = []
    for array in others:
        role = _role_of_words(array.path)
        if array.value.ndim < 2 or role is None or weights.keys() & {role, *role}:
            left.append(array)
        else:
            _give(parts, role, array, others)
    matrices = [array for array in left if array.value.ndim > 1]
    first = [x.value.shape for x in weights.get("q", weights.get("qkv", []))]
    if [each.value.ndim for each in matrices] == [2]:
        sizes = set(matrices[0].value.shape)
        # beside the width of the input three of the same; W_O reads the features of all heads, or of a third
        three = [n for n in sizes - {WIDTH} if n % 3 == 0]
        made = {sum(map(min, first)), sum(map(max, first))}
        made |= {shape[0] // 3 for shape in first[:1]}
        if not first and WIDTH in sizes and three:
            _give(parts, "qkv", matrices[0], left)
        elif "o" not in weights and made & sizes:
            _give(parts, "o", matrices[0], left)
    known = {id(array) for arrays in weights.values() for array in arrays}
    unread = [x for x in matrices if id(x) not in known]
    modules = {x.path.rpartition(".")[0] for x in unread}
    # and their biases
    unread += [
        x for x in left if x.value.ndim == 1 and x.path.rpartition(".")[0] in modules
    ]
    parts.unread.extend(unread)


def _give(parts: Parts, role: str, array: Array, others: list[Array]) -> None:
    """Let a matrix have a role, and the bias that stands beside it and fits."""
    parts.weights[role] = [array]
    module = array.path.rpartition(".")[0]
    for each in others:
        owner, _, name = each.path.rpartition(".")
        fits = each.value.ndim == 1 and each.value.size in array.value.shape
        if fits and owner == module and _BIAS.search(name):
            parts.biases[role] = [each]


def _role_of_words(path: str) -> str | None:
    """The role that single words of a path tell: q of `cast_queries`, kv of `cast_keys_values`."""
    roles = {role_of(word) for word in re.split(r"[._\d]+", path)} - {None}
    if len(roles) > 1:
        roles.discard("o")
    joined = "".join(sorted(map(str, roles), key="qkvo".find))
    return joined if joined in ROLES else None


def still_parts(module: Any) -> bool:
    """Put the identity in the place of norms around the attention, and of a dropout of the file's own.

    Norms of queries and keys stay. Was there one?
    """
    changed = False
    modules: Any = getattr(module, "modules", lambda: [module])
    for parent in list(modules()):
        for name, child in list(_children(parent)):
            is_torch = hasattr(child, "named_parameters")
            pattern = "Norm" if is_torch else "Norm|Dropout"
            is_norm = re.search(pattern, type(child).__name__)
            if is_norm and not _is_of_heads(str(name), child):
                still = (
                    sys.modules["torch"].nn.Identity if is_torch else LENT["Dropout"]
                )
                setattr(parent, name, still())
                changed = True
    return changed


def _is_of_heads(name: str, norm: Any) -> bool:
    """Is a norm that of queries or keys? What is narrower than a head is a latent."""
    is_narrow = any(weight.numel() < HEAD_DIM for weight in parameters_of(norm))
    words = r"(?<![a-z])(q|k|quer\w*|keys?|qk)(?![a-z])"
    return not is_narrow and re.search(words, name) is not None


def readings(target: Target, instance: Any, folded: bool = False) -> list[Reading]:
    """How correct code may use the weights of an object, the usual readings first. UncheckedError where none fits.

    folded  may the scale 1/sqrt(d) be in a weight, so that code without one is right?
    """
    parts = parts_of(instance, target.options.mapping)
    width = width_of(parts, target.sizes)
    counts = [heads_of(instance, target)]
    inside = getattr(instance, "__dict__", {})
    kept = {x for x in inside.values() if type(x) is int and 1 < x <= width}
    # A count that the object does not keep may be wrong: then each number that it keeps is tried, too.
    if counts[0][0] not in kept:
        counts += [(n, None) for n in sorted(kept) if width % n == 0]
    if counts[0][0] is None and (d := kept_as("HEAD_DIM", instance, target)):
        counts.insert(0, (width // d, None))
    if "qkv" in parts.weights:  # one key/value head for all
        counts += [(heads, 1) for heads, groups in counts if heads and groups is None]
    # how q, k and v stand in one fused matrix; see `_unfused`
    orders: tuple[str, ...] = ("blocks",)
    if {"qkv", "kv"} & set(parts.weights):
        orders = (
            "blocks", "groups", "features", "kqv", "vqk", "qvk", "(d k h)", "(d h k)", "(d k h) qvk",
        )  # fmt: skip
    sides: tuple[str, ...] = (
        "in-out",
    )  # of a matrix: which of its axes is summed over
    if any(_is_square(array) for arrays in parts.weights.values() for array in arrays):
        sides = ("in-out", "out-in")
    fitting = []
    for (heads, groups), order, side in itertools.product(counts, orders, sides):
        with contextlib.suppress(
            ValueError, KeyError, IndexError
        ):  # the shapes do not allow it
            fitting.append(_read(parts, heads, groups, width, order, side))
    if not fitting:
        shapes = ", ".join(
            f"{role} {arrays[0].value.shape}" for role, arrays in parts.weights.items()
        )
        raise UncheckedError("no_fit", shapes=shapes)
    bases = []  # of rotary angles; none: nothing is rotated
    if target.scope.says(ROTATES):
        # The usual one, then three numbers of the file at most that may be one: each of them multiplies the readings.
        # Round bounds: below lie sizes, such as a width of 64; above lie numbers that hide scores, such as 1e9.
        others = [n for n in target.source.numbers if 100 <= n < 1e7 and n != 10000.0]
        bases = [10000.0, *others[:3]]
    fractions: Sequence[float] = FRACTIONS if target.scope.says(ROTATES_PART) else (1,)
    if parts.rotated:
        fractions = (parts.rotated,)
    # what is normed may say that it needs none, and T5 has none
    unscaled = parts.gains and target.scope.says(r"scal\w* ?= ?1(\.0)?\b")
    unscaled = unscaled or target.scope.tells(r"\bt5|unscaled")
    scales: list[Settings] = [{}, {"scale": "none"}] if folded or unscaled else [{}]
    is_normed = target.scope.says(NORMED)
    if is_normed:  # what is normed has a length of its own, so its scale is a choice
        factors = [n for n in target.scope.numbers if 1 < n < 100 and n % 1]
        scales += [{"scale": n**power} for n in factors[:2] for power in (1, 2)]
    residuals: list[Settings] = (
        [{}, {"residual": True}] if target.scope.says(RESIDUAL) else [{}]
    )
    extras = _extras(target, parts, inside, counts[0][0])
    may_rest = _may_not_rotate(target, inside)
    choices: list[Reading] = []
    # Of readings that give the same numbers the first one counts, so the usual ones come before a scale that is
    # folded into a weight.
    for scale, extra, reading, residual in itertools.product(
        scales, extras, fitting, residuals
    ):
        settings = {**reading.settings, **scale, **residual, **extra}
        reading = replace(reading, settings=settings)
        if may_rest:
            choices += styles(reading, [], fractions, is_normed)
        choices += styles(reading, bases, fractions, is_normed)
    return choices


def _may_not_rotate(target: Target, inside: Any) -> bool:
    """Are rotary positions a choice of the code, or made elsewhere, so that it may have made none?"""
    elsewhere = [*inside.values(), *target.namespace.values()]
    optional = any(x is unchanged or isinstance(x, Unturned) for x in elsewhere)
    optional |= target.scope.says(
        r"(cos|sin|rope|rotary)\w*(: [^,=)]*)? ?= ?none|use_(rope|rotary)"
    )
    for node in ast.walk(target.scope.tree):
        if isinstance(node, ast.If) and re.search(
            "None|(?i:rope|rotary)", ast.unparse(node.test)
        ):
            body = "\n".join(map(ast.unparse, node.body)).lower()
            optional |= re.search(ROTATES, body) is not None
    return bool(optional)


def _extras(target: Target, parts: Parts, inside: Any, heads: Any) -> list[Settings]:
    """What correct code may have besides: activations, a cap, slopes, gates, W_V and W_O in one."""
    extras: list[Settings] = [{}]
    if target.scope.says("activation"):
        extras += [{"act": "relu"}]
    kept = [*inside.values(), *target.source.numbers, WINDOW]
    numbers = [float(n) for n in kept if type(n) in (int, float) and n > 1]
    if target.scope.says("tanh"):
        caps = list(dict.fromkeys(numbers))[:6]
        extras += [{"softcap": cap} for cap in caps]
    if target.scope.says(
        "window|sliding|local_?att|ventana|finestra|fen[eê]tre|fenster|janela"
    ):
        sizes = sorted({int(n) for n in numbers if n < TOKENS})
        # a window of n, and n beside the query itself
        windows = [{"window": n + more} for n in sizes for more in (0, 1)]
        extras += [{**extra, **window} for extra in extras for window in windows]
    if heads and target.scope.says("alibi|slope"):
        usual = 2 ** (-8 / heads * np.arange(1, heads + 1))
        of_paper = np.array(alibi_slopes(heads))
        # they are the same where the heads are a power of two
        series = [usual] if np.allclose(usual, of_paper) else [usual, of_paper]
        extras += [{**e, "slopes": each} for e in extras for each in series]
    for name, value in {**inside, **inside.get("_buffers", {})}.items():
        is_slope = re.search("slope|alibi|^m$", name)
        slopes = to_array(value) if is_slope else None
        if slopes is not None and slopes.size == heads:
            extras = [{"slopes": slopes.ravel(), **extra} for extra in extras]
    if re.search("[mg]qa|multi_?query|group", target.name, re.I):
        extras += [{"shared": "KV"}]  # the first head of a matrix for all
    values = parts.weights.get("v", [])
    shape = set(values[0].value.shape) if len(values) > 1 else set()
    if len(shape) == 1 and "o" not in parts.weights:
        extras += [{"join": "sum"}]  # W_V and W_O of a head in one matrix
    if parts.gate[1] is not None:
        extras += [{"gate": "silu"}]
    return extras


def _is_square(array: Array) -> bool:
    """Do the shapes leave open on which side it is multiplied?"""
    return (
        not array.linear and array.value.ndim == 2 and len(set(array.value.shape)) == 1
    )


def _matrix(array: Array, width: int, n: int, side: str, output: bool) -> Any:
    """A matrix as (in, out), heads as blocks of the width.

    width   C, of the input
    n       heads in it
    side    "in-out" or "out-in", where it is square
    output  is it W_O, which reads joined heads and gives C?
    """
    value = array.value
    if (
        value.ndim == 3
    ):  # einsum parameters, (h,C,d) in any order: axes told apart by their sizes
        h = value.shape.index(n) if n in value.shape else 0
        # Where no axis is C, `[0]` raises the IndexError of which `_read` speaks.
        c = [axis for axis in range(3) if value.shape[axis] == width and axis != h][0]  # noqa: RUF015
        d = 3 - h - c  # the axis that is left of 0, 1, 2
        return (
            value.transpose(h, d, c).reshape(-1, width)
            if output
            else value.transpose(c, h, d).reshape(width, -1)
        )
    if array.linear or (_is_square(array) and side == "out-in"):
        return value.T
    # Of two sizes the one that is C tells: it is the first axis, of W_O the second. A layer may give another width.
    is_turned = value.shape[not output] == width and not _is_square(array)
    return value.T if is_turned else value


def _read(
    parts: Parts, H: int | None, G: int | None, width: int, order: str, side: str
) -> Reading:
    """One reading; ValueError, KeyError or IndexError where the shapes do not allow it.

    H, G  heads of queries, and of keys and values, as names tell them or as a guess; None where nothing does
    """
    listed = 1  # heads that have a matrix each
    # One list may be shorter than the others: of keys, where heads share them.
    for role in {"q", "k", "v"} & set(parts.weights):
        listed = max(listed, len(parts.weights[role]))
    H = listed if listed > 1 else H or 1
    G = G or H
    matrices, biases = _joined(parts, H, G, width, order, side, listed)
    if listed > 1 and len(matrices["q"]) * listed == width:
        # each head's own matrix reads its own part of the input
        for role in "qkv":
            matrices[role] = _diagonal(np.split(matrices[role], listed, 1))
    small = matrices["q"].shape
    out = matrices["o"]
    is_cut = small[0] == small[1] and 1 < H == width // small[0] and listed == 1
    # W_O reads more features than the projections make: all heads have the same ones.
    is_same = (out is None and parts.same_head) or (
        out is not None and len(out) == H * small[1]
    )
    alike = {matrices[role].shape[1] for role in "qkv"}
    is_same = is_same and listed == 1 and H > 1 and len(alike) == 1 and not is_cut
    if is_cut or is_same:
        # the input is cut into heads first, and one small matrix serves all; or each has the whole input
        spread = np.eye(H) if is_cut else np.ones((1, H))
        for role in "qkv":
            matrices[role] = np.kron(spread, matrices[role])
            if role in biases:
                biases[role] = np.tile(biases[role], H)
    # How many features each matrix makes, of all its heads together.
    of_q, of_k, of_v = (matrices[role].shape[1] for role in "qkv")
    gate = parts.gate
    is_double = out is not None and of_q == 2 * len(out) and of_k < of_q
    if is_double and listed == 1 and "q" not in biases:
        # each head's queries have its gate behind them, as in Qwen3-Next
        both = matrices["q"].reshape(width, H, 2, -1)
        matrices["q"], of_gate = (both[:, :, i].reshape(width, -1) for i in (0, 1))
        gate = [0.0, of_gate]
        of_q //= 2
    d = of_q // H
    shared = parts.same_head or is_same
    # From here the shapes decide, not a name: the heads of keys are as many as heads of width d fit in their
    # features.
    G = of_k // max(d, 1)
    if not G or of_q % H or of_k % d or H % G or of_v % G:
        raise ValueError("heads of other widths")
    # of all query heads, of their mean, or of as many as there are keys
    joined = (H * of_v // G, of_v // G, of_v)
    if out is not None and not shared and len(out) not in joined:
        raise ValueError("W_O reads other heads")
    # A norm of all heads together, (h*d,), is left out: the form has none.
    gains = {
        role: array.value.reshape(-1, 1, d)
        for role, array in parts.gains.items()
        if array.value.shape[-1] == d
    }
    structural = ("heads-share-projection",) if shared or is_cut else ()
    return Reading(
        Weights(H, G, matrices, biases, gains, parts.sink, gate),
        {"qk_norm": "rms"} if gains else {},
        structural,
    )


def _joined(
    parts: Parts, H: int, G: int, width: int, order: str, side: str, listed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Matrices as (in, out) and biases by role, of all heads together.

    listed  heads that have a matrix each, or 1
    """
    # One W_O for each head, whose biases add up, or one for all; others, such as an MLP's c_proj, are left out.
    outputs = listed if len(parts.weights.get("o", ())) >= listed else 1
    matrices: dict[str, Any] = {"o": None}
    biases: dict[str, Any] = {}
    for role, arrays in parts.weights.items():
        pieces = [
            _matrix(array, width, H if role in "qo" else G, side, role == "o")
            for array in arrays
        ]
        matrices[role] = (
            np.concatenate(pieces[:outputs])
            if role == "o"
            else np.concatenate(pieces, 1)
        )
    for role, arrays in parts.biases.items():
        pieces = [array.value.ravel() for array in arrays]
        biases[role] = sum(pieces[:outputs]) if role == "o" else np.concatenate(pieces)
    for fused in {"qkv", "kv"} & set(matrices):
        for held in (matrices, biases):
            if fused in held:
                held.update(_unfused(held.pop(fused), fused, H, G, order))
    return matrices, biases


def _diagonal(blocks: list[Any]) -> Any:
    """Matrices along the diagonal of one, with 0 elsewhere."""
    places = np.eye(len(blocks))
    return sum(np.kron(np.diag(p), x) for p, x in zip(places, blocks, strict=True))


def _unfused(x: Any, fused: str, H: int, G: int, order: str) -> dict[str, Any]:
    """W_QKV or W_KV (C, width), or its bias (width,), cut into those of the roles; ValueError where no heads fit.

    fused  "qkv" or "kv"
    order  "blocks" q | k | v; "groups", of each key/value head its queries, its key, its value; "features" (h, d, 3);
           "kqv" and such: in another order; axes in parentheses: features first
    """
    names = fused
    if order[-3:] in ("kqv", "vqk", "qvk"):
        names = order[-3:] if fused == "qkv" else "vk"
    # Only in blocks and groups may there be fewer key/value heads than query heads.
    if H % G or (order not in ("blocks", "groups") and fused == "qkv" and H != G):
        raise ValueError("no whole heads")
    shares = [
        H // G if role == "q" else 1 for role in names
    ]  # heads of each, for a key/value head
    n = sum(shares)
    axes = {
        "groups": (G, n, -1), "features": (-1, n), "(d k h)": (-1, n, H), "(d h k)": (-1, H, n),
    }.get(order.removesuffix(" qvk"), (n, -1))  # fmt: skip
    lead = x.shape[:-1]
    last = order in ("features", "(d h k)")
    x = x.reshape(*lead, *axes)
    pieces = np.split(x, np.cumsum(shares)[:-1], -1 if last else -2)
    if order[0] == "(":  # of each (d, h), which is brought to (h, d)
        pieces = [piece.reshape(*lead, -1, H).swapaxes(-1, -2) for piece in pieces]
    return {
        role: piece.reshape(*lead, -1)
        for role, piece in zip(names, pieces, strict=True)
    }


def styles(
    reading: Reading,
    bases: Sequence[float],
    fractions: Sequence[float] = (1,),
    normed: bool = False,
) -> Iterator[Reading]:
    """The readings of the same weights in every layout, and in every rotation with one of these bases.

    bases      of rotary angles; without one nothing is rotated
    fractions  how much of the features of a head may be rotated, 0 to 1
    """
    interleaved = {f"split_{role}": "interleaved" for role in "qkv"} | {
        "join": "interleaved"
    }
    # W_Q is called W_K and the other way round, which is no bug
    exchanged = {"q_from": "k", "k_from": "q"}
    weights = reading.weights
    turns = itertools.product((1, -1), fractions, bases, ("half", "interleaved"))
    # The layout stands twice: of the turn, and of the table, which agree in correct code.
    ropes: list[Settings] = []
    for sign, part, base, turn in turns:
        ropes.append({"rope": (turn, turn, base), "rope_part": part, "rope_sign": sign})
    norms: list[Settings] = [{"qk_norm": kind} for kind in ("rms", "layer")]
    choices: list[list[Settings]] = [
        ropes or [{}],
        norms if weights.gains else [{}, *norms] if normed else [{}],
        [{}, interleaved] if weights.n_heads > 1 else [{}],
        [{}, exchanged] if weights.n_heads == weights.n_kv_heads else [{}],
    ]
    for rope, norm, layout, swap in itertools.product(*choices):
        settings = {**reading.settings, **rope, **norm, **layout, **swap}
        yield Reading(weights, settings, reading.structural)


# What no name tells: counts of heads, folded scales, shared modules.


def kept_as(meaning: str, instance: Any, target: Target) -> int | None:
    """A whole number that the caller, the object, its config, a module of it or the file keeps under such a name."""
    kept = getattr(instance, "__dict__", {})
    told = CALL["config"].fullmatch
    configs = [x for name, x in kept.items() if told(name) or isinstance(x, Config)]
    # of torch's own a convolution has `groups`
    modules = [
        x for x in _modules_of(kept) if not type(x).__module__.startswith("torch")
    ]
    # what the code reads of the file; another class may have other numbers
    used = target.scope.names
    names = {name: value for name, value in target.namespace.items() if name in used}
    for name, value in names.items():
        # a class has defaults, of which we passed others
        if CALL["config"].fullmatch(name) and not isinstance(value, type):
            configs.append(value)
    # `self.h` may be the width of a head
    passed = target.sizes.get("HEADS", HEADS)
    counts = [value for value in kept.values() if type(value) is int]
    is_width = meaning == "HEADS" and passed in counts
    for place in (target.options.args, kept, *configs, *modules, names):
        # Of a dictionary its own items; a module that a class leaves out is None, and has none.
        items = place if isinstance(place, dict) else getattr(place, "__dict__", {})
        if isinstance(place, Config):
            nodes = ast.walk(target.scope.tree)
            fields = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            items = {name: place.get(name) for name in fields}
        for name, value in items.items():
            is_count = type(value) is int and name not in VALUES
            is_count = is_count and not (is_width and value == HEAD_DIM)
            if is_count and meaning_of(name) == meaning:
                return value
    return None


def heads_of(instance: Any, target: Target) -> tuple[int | None, int | None]:
    """How many heads of queries, and of keys and values, as far as anything tells."""
    if target.scope.code and not target.scope.says(
        r"head|cabe[cçz]a|t[eê]te|teste|k[oö]pf|koepf|\bn?_?h\b|\bnh\b"
    ):
        return None, None  # a file's own number is of other code
    heads = kept_as("HEADS", instance, target)
    # The class has an argument of that kind, which the object need not keep: it was given our number of heads.
    names = arguments_of(target.thing)
    counts = "(?i)^(?!.*(dim|size)).*(head|cabe[cçz]a|t[eê]te|teste|k[oö]pf|koepf)"
    meanings = set(map(meaning_of, names))
    unknown = [name for name in names if meaning_of(name) is None]
    told = any(re.search(counts, name) for name in unknown)
    is_config = any(map(CALL["config"].fullmatch, names))
    if heads is None and (told or is_config or "HEADS" in meanings):
        heads = target.sizes.get("HEADS", HEADS)
    return heads, kept_as("KV_HEADS", instance, target)


def width_of(parts: Parts, sizes: Settings) -> int:
    """Width of the input, from the matrix of queries. UncheckedError where there is none."""
    arrays = parts.weights.get("q") or parts.weights.get("qkv")
    if not arrays:
        raise UncheckedError("no_weights")
    shape = arrays[0].value.shape
    usual = sizes.get("WIDTH", WIDTH)
    outputs = [n for array in parts.weights.get("o", ()) for n in array.value.shape]
    is_cut = usual in outputs or len(arrays) * HEAD_DIM == usual
    if shape == (HEAD_DIM, HEAD_DIM) and is_cut:
        return int(usual)  # small matrices for the parts of the input
    if arrays[0].linear:
        return int(shape[1])
    return usual if usual in shape else int(max(shape))


def _modules_of(kept: dict[str, Any]) -> list[Any]:
    """Those of torch; a list of that name is the learner's own."""
    modules = kept.get("_modules")
    return [*modules.values()] if isinstance(modules, dict) else []


def _is_one_module(instance: Any) -> bool:
    """Does a list of heads hold one module several times?"""
    kept = getattr(instance, "__dict__", {})
    for heads in (*_modules_of(kept), *kept.values()):
        listed = isinstance(heads, list) or type(heads).__name__ == "ModuleList"
        if (
            listed
            and len(heads) > 1
            and hasattr(heads[0], "__dict__")
            and len({*map(id, heads)}) == 1
        ):
            return True
    return False


def scale_is_folded(parts: Parts) -> bool:
    """Are the drawn weights of queries smaller than those of values by the square root of a head's width?"""
    if not {"q", "k", "v"} <= set(parts.weights):
        return False
    q, k, v = (float(np.std(parts.weights[role][0].value)) for role in "qkv")
    if v == 0:
        return False
    # In W_Q, in W_K, or a part of it in each. The width is that of our sizes, with which the object was built.
    ratios = np.array([q / v, k / v, q * k / v**2]) * HEAD_DIM**0.5
    # 1, as near as deviations of drawn weights tell: 0.85 and its inverse. Without the fold it is sqrt(8) = 2.8.
    return bool(((ratios > 0.85) & (ratios < 1.18)).any())


def renew(arrays: list[Array], rng: np.random.Generator, size: float = 1.2) -> None:
    """New numbers for all weights: biases that start at 0 would hide, and small weights make every row alike.

    size  of what comes out of a matrix, as a deviation: with 1.2 that of scores is 1.4, and maps are far from even
    """
    for array in arrays:
        shape = array.value.shape
        # of biases, so that one that is missing shows; a round choice
        spread = min(0.4, size)
        if len(shape) > 1:
            summed = shape[-1] if array.linear else shape[-2]
            spread = size / max(summed, 1) ** 0.5
        # a gain lies around 1
        numbers = rng.normal(size=shape) * spread + bool(_NORM.search(array.path))
        # A matrix of lists keeps its numbers: it has no biases beside it, as `arrays_of` finds no flat lists.
        if isinstance(array.holder, np.ndarray):
            if array.holder.flags.writeable:
                array.holder[...] = numbers
        elif hasattr(array.holder, "detach"):
            import torch

            with torch.no_grad():
                array.holder.copy_(torch.from_numpy(numbers).view_as(array.holder))
