"""Stand-ins for what a machine may lack: libraries that compute as NumPy does, parts of a layer in other files.

To lend another name is a function of that name in LENT, or in OF_NUMPY for those libraries alone.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import itertools
import math
import re
import types
from typing import Any, ClassVar

import numpy as np


def library_of(x: Any) -> Any:
    return importlib.import_module("torch" if hasattr(x, "detach") else "numpy")


def softmax(x: Any, axis: int = -1, **named: int) -> Any:
    axis = named.get("dim", axis)
    powers = library_of(x).exp(x - x.max())
    return powers / powers.sum(axis, keepdims=True)


def named_einsum(pattern: str, *arrays: Any) -> Any:
    """The einsum of fancy_einsum, whose axes are words and whose text comes first."""
    return importlib.import_module("einops").einsum(*arrays, pattern)


def attend(*args: Any, mask: Any = None, **named: Any) -> tuple[Any, Any]:
    """Scaled dot products as courses put them into a file of their own; 0 in a mask hides."""
    # a dropout may stand there, too
    q, k, v, *masks = [x for x in (*args, *named.values()) if hasattr(x, "shape")]
    mask = masks[0] if masks else mask
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -math.inf)
    weights = scores.softmax(-1)
    return weights @ v, weights


def linear(width: int, out: int, bias: bool = True, **_: Any) -> Any:
    return importlib.import_module("torch.nn").Linear(width, out, bias=bias)


class Lazy:
    """A module of flax, Keras or MLX, whose fields are arguments; what it makes in a call, or before, is made once."""

    name: Any = dataclasses.field(default=None, kw_only=True)
    # modules whose call is under way, with a counter of what each makes; None within `setup` and `build`
    calls: ClassVar[list[Any]] = []

    def __new__(cls, *_: Any, name: Any = None, **__: Any) -> Any:
        made = object.__new__(cls)
        if not Lazy.calls or Lazy.calls[-1] is None:
            return made
        owner, count = Lazy.calls[-1]
        return vars(owner).setdefault(name or f"{cls.__name__}_{next(count)}", made)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing is kept of what a learner's class hands on."""

    def __init_subclass__(cls) -> None:
        for name in {"__call__", "call"} & vars(cls).keys():
            setattr(cls, name, _lazily(vars(cls)[name]))
        dataclasses.dataclass(eq=False, repr=False)(cls)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.call(*args, **named)  # type: ignore[attr-defined]

    def setup(self, *_: Any) -> None:
        """Nothing, where the learner makes nothing before a call."""

    build = setup

    def add_weight(self, *_: Any, shape: Any, **__: Any) -> Any:
        return drawn(shape)

    def param(self, name: str, _: Any, shape: Any) -> Any:
        return vars(self).setdefault(name, drawn(shape))


def _lazily(call: Any) -> Any:
    @functools.wraps(call)
    def called(self: Any, *args: Any, **named: Any) -> Any:
        Lazy.calls.append(None)
        if not vars(self).setdefault("is_built", False):
            self.is_built = True
            self.setup()
            self.build(np.shape([*args, *named.values()][0]))
        Lazy.calls[-1] = self, itertools.count()
        args = tuple(map(as_array, args))
        named = {name: as_array(x) for name, x in named.items()}
        try:
            return call(self, *args, **named)
        finally:
            Lazy.calls.pop()

    return called


class Array(np.ndarray):
    """One of JAX or TensorFlow, with the methods that NumPy's lack."""

    def split(self, parts: Any, axis: int = 0) -> Any:
        return split(self, parts, axis)

    def get_shape(self) -> Any:
        return Shape(super().shape)

    shape = property(get_shape)


class Shape(tuple[int, ...]):
    def as_list(self) -> list[int]:
        return [*self]


def as_array(x: Any) -> Any:
    return x.view(Array) if type(x) is np.ndarray else x


def split(
    x: Any, parts: Any = None, axis: int = 0, num_or_size_splits: Any = None
) -> Any:
    """By a count, by places as JAX has it, or by sizes as TensorFlow has it, which add up to the whole."""
    if parts is None:
        parts = num_or_size_splits
    if np.ndim(parts) and sum(parts) == x.shape[axis]:
        parts = np.cumsum(parts)[:-1]
    return np.split(x, parts, axis)


def band_part(x: Any, num_lower: int, num_upper: int) -> Any:
    """As many diagonals below and above the main one as are asked for; all of them where the number is negative."""
    if num_lower >= 0:
        x = np.triu(x, -num_lower)
    return x if num_upper < 0 else np.tril(x, num_upper)


def variable(initial_value: Any = None, *_: Any, value: Any = None, **__: Any) -> Any:
    return np.asarray(initial_value if value is None else value)


def drawn(shape: Any) -> Any:
    return np.random.default_rng(0).normal(size=shape) / shape[0] ** 0.5


class Dense(Lazy):
    """A layer of a NumPy library: its two sizes, or the second alone, whatever their names are."""

    def __init__(self, *sizes: Any, **named: Any) -> None:
        self.sizes = [n for n in (*sizes, *named.values()) if type(n) is int][:2]
        self.is_biased = named.get("use_bias", named.get("bias", True))

    def forward(self, x: Any, *_: Any) -> Any:
        width, out = [x.shape[-1], *self.sizes][-2:]
        kept = vars(self)
        bias = kept.setdefault("b", np.zeros(out)) if self.is_biased else 0
        return x @ kept.setdefault("w", drawn((width, out))) + bias

    call = forward


class DenseGeneral(Dense):
    """flax's layer over several axes: `features` (h,d) of those that come out; `axis` of those that are summed."""

    def __init__(self, features: Any, axis: Any = -1, **named: Any) -> None:
        self.features = np.atleast_1d(features)
        self.n_axes = np.size(axis)
        super().__init__(int(np.prod(features)), **named)

    def forward(self, x: Any, *_: Any) -> Any:
        lead = x.shape[: x.ndim - self.n_axes]
        return super().forward(x.reshape(*lead, -1)).reshape(*lead, *self.features)

    call = forward


def vmap(function: Any, in_axes: Any = 0, out_axes: int = 0) -> Any:
    """JAX's map over an axis of each argument, None for those that stay whole."""

    def mapped(*args: Any) -> Any:
        axes = in_axes if isinstance(in_axes, tuple | list) else [in_axes] * len(args)
        cut = [
            itertools.repeat(x) if axis is None else np.moveaxis(x, axis, 0)
            for x, axis in zip(args, axes, strict=True)
        ]
        rows = [function(*row) for row in zip(*cut, strict=False)]
        if isinstance(rows[0], tuple):
            return tuple(np.stack(part, out_axes) for part in zip(*rows, strict=True))
        return np.stack(rows, out_axes)

    return mapped


def unnamed(function: Any) -> Any:
    """A function that takes a name for its result as well, as those of TensorFlow do."""
    if isinstance(function, type) or not callable(function):
        return function
    return lambda *args, name=None, **named: function(*args, **named)


def where(condition: Any, *values: Any) -> Any:
    """As JAX has it: NumPy takes None for a condition that never holds."""
    if condition is None:
        raise TypeError("NoneType is no condition")
    return np.where(condition, *values)


class Plain:
    """A layer without weights, which in eval does what `step` does."""

    def __init__(self, step: Any) -> None:
        self.step = step

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        return self.step(x)

    def eval(self) -> Any:
        return self

    __call__ = forward
    train = eval


def unchanged(x: Any, *others: Any, **_: Any) -> Any:
    """What a rotation, or a norm, of another file is given: queries alone, or with keys, and what has other axes."""
    alike = [y for y in others if np.ndim(y) == np.ndim(x)]
    return (x, *alike) if alike else x


class Unturned:
    """Rotary positions of another file: as an object, a function or tables. What they are given stays as it is."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        arrays = [x for x in (*args, *named.values()) if np.ndim(x) > 1]
        return unchanged(*arrays) if arrays else self

    def __getattr__(self, name: str) -> Any:
        if not re.search("rot|rope|cos|sin|freq|cache|forward|^to$", name):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __iter__(self) -> Any:
        return iter((self, self))  # cosines and sines


def matmul(a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    return (a.swapaxes(-1, -2) if transpose_a else a) @ (
        b.swapaxes(-1, -2) if transpose_b else b
    )


def clones(*args: Any, **named: Any) -> Any:
    """Copies of a module, as many as the other argument says."""
    module, count = sorted((*args, *named.values()), key=lambda arg: type(arg) is int)
    copies = [copy.deepcopy(module) for _ in range(count)]
    return importlib.import_module("torch.nn").ModuleList(copies)


def norm(*_: Any, **__: Any) -> Any:
    """The identity, which stands in for every norm around an attention."""
    return importlib.import_module("torch.nn").Identity()


def init(x: Any, **named: Any) -> Any:
    return importlib.import_module("torch.nn.init").trunc_normal_(x, **named)


def conv1d(out: int, *sizes: int) -> Any:
    """GPT-2's name for a linear layer: what comes out, then what goes in."""
    return linear(sizes[-1], out)


LENT: dict[str, Any] = {
    **dict.fromkeys(("clones", "get_clones", "_get_clones"), clones),
    **dict.fromkeys(("RMSNorm", "LayerNorm", "DropPath"), norm),
    "softmax": softmax,
    **dict.fromkeys(
        ("ScaledDotProductAttention", "ScaleDotProductAttention", "Attention"),
        lambda *_, **__: attend,
    ),
    "scaled_dot_product_attention": lambda *args, **named: attend(*args, **named)[0],
    **dict.fromkeys(("Linear", "ColumnParallelLinear", "RowParallelLinear"), linear),
    "Dense": Dense,
    "DenseGeneral": DenseGeneral,
    "Conv1D": conv1d,
    "trunc_normal_": init,
    "to_2tuple": lambda x: x if isinstance(x, tuple) else (x, x),
    "Softmax": lambda *_, **__: Plain(softmax),
    "Dropout": lambda *_, **__: Plain(lambda x: x),
    "dropout": lambda x, *_, **__: x,
    "get_model_parallel_world_size": lambda: 1,
    "get_device": lambda *_: "cpu",
    "device": "cpu",
}

# libraries whose arrays are NumPy's here, and what they name otherwise
LIKE_NUMPY = re.compile(
    r"(jax|flax|haiku|equinox|tensorflow|keras|mlx|cupy)\b(?!.*\.random\b)"
)
OF_NUMPY: dict[str, Any] = {
    **dict.fromkeys(("Module", "Layer", "Model"), Lazy),
    "Linear": Dense,
    "LayerNorm": LENT["Dropout"],
    "LayerNormalization": LENT["Dropout"],
    "relu": lambda x: np.maximum(x, 0),
    "jit": lambda function, **_: function,
    "vmap": vmap,
    "field": lambda static=False, **named: dataclasses.field(**named),
    "Conv1D": None,  # in Keras a convolution
    "matmul": matmul,
    "transpose": lambda x, axes=None, perm=None: np.transpose(x, perm or axes),
    "cast": lambda x, dtype: np.asarray(x).astype(dtype),
    "range": np.arange,
    "where": where,
    "int_shape": np.shape,
    "reshape": lambda x, shape, **_: np.reshape(x, shape),
    "merge_param": lambda _, field, argument: field if argument is None else argument,
    "static_field": dataclasses.field,
    "split": split,
    "gather": lambda x, at, axis=0: np.take(x, at, axis),
    "unstack": lambda x, num=None, axis=0: [*np.moveaxis(x, axis, 0)],
    **dict.fromkeys(("Variable", "constant", "convert_to_tensor"), variable),
    **{f"reduce_{name}": vars(np)[name] for name in ("sum", "mean", "max")},
    "permute_dimensions": lambda x, pattern: np.transpose(x, pattern),
    "batch_dot": lambda a, b, axes: (
        np.moveaxis(a, axes[0], -1) @ np.moveaxis(b, axes[1], 1)
    ),
    "repeat_elements": np.repeat,
    "stop_gradient": LENT["dropout"],
    "select": np.where,
    "broadcast": lambda x, sizes: np.broadcast_to(x, (*sizes, *np.shape(x))),
    "Lambda": lambda step, *_, **__: Plain(step),
    "Add": lambda **_: Plain(sum),
    "band_part": band_part,
    "Permute": lambda axes: Plain(lambda x: np.transpose(x, (0, *axes))),
    "Reshape": lambda shape: Plain(lambda x: np.reshape(x, (len(x), *shape))),
}

OF_JAX_RANDOM: dict[str, Any] = {
    "split": lambda key, n=2: [key] * n,
    **dict.fromkeys(("key", "PRNGKey"), np.random.default_rng),
    **dict.fromkeys(("normal", "uniform"), lambda key, shape, *_, **__: drawn(shape)),
}


def on_processor(torch: Any) -> None:
    """From here on a device of the name cuda is the processor."""

    def plain(x: Any) -> Any:
        is_device = isinstance(x, str | torch.device)
        return "cpu" if is_device and str(x).startswith("cuda") else x

    class OnProcessor(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            named = {name: plain(x) for name, x in (kwargs or {}).items()}
            return func(*map(plain, args), **named)

    OnProcessor().__enter__()


def stand_in(name: str) -> Any:
    """A module, or what a module has under that name; None for what nothing stands in for."""
    if re.search(r"ca(us|su)al_attention\.CausalAttention$", name):
        # of a course, from a file of that name, however it is spelt
        course = importlib.import_module("headwise.courses.from_scratch")
        return vars(course)["CausalAttention"]
    if name == "fancy_einsum":
        return types.SimpleNamespace(einsum=named_einsum)
    last = name.rpartition(".")[2]
    if name.startswith("jax.random."):
        return OF_JAX_RANDOM.get(last)
    if re.search(r"\binitializers\.\w+$", name):
        return lambda *_, **__: lambda key, shape, *_: drawn(shape)
    for place in (OF_NUMPY, vars(np)) if LIKE_NUMPY.match(name) else ():
        if last in place and not isinstance(place[last], types.ModuleType):
            return unnamed(place[last])
    if re.search(r"rope|rotar", last, re.I):
        return Unturned()
    return LENT.get(last)
