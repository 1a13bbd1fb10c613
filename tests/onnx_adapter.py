"""The ONNX operator Attention, opsets 23 to 25, said in headwise's words, and the cases that the `onnx` package has.

Where the operator means something else than a default of headwise, that is spelled out: the diagonal of `is_causal`
and of the windows lies at the number of keys before the first query (past keys, or real keys less T), and at 0 without
a cache, where `Causal()` by itself aligns at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import numpy as np
import torch

import headwise as hw

Arrays = dict[str, np.ndarray]

# How far an answer may be off, relative to the expected one, in units of the last place. The expected answers have
# errors of their own, made in the inputs' type: one unit in float16 and bfloat16, for which two are allowed; sums of 18
# terms in another order, five units in float32, for which sixteen are.
ULPS = {"float32": 16 * 2.0**-23, "float16": 2 * 2.0**-10, "bfloat16": 2 * 2.0**-7}
QK_STEPS = ("scores", "capped", "masked", "weights")  # qk_matmul_output_mode 0 to 3, as fields of hw.Trace
DOUBLE = 11  # TensorProto.DOUBLE


@dataclass(frozen=True)
class Case:
    """One case of the operator: its attributes, and inputs and expected outputs by the names of the schema."""

    name: str
    attributes: dict[str, Any]
    inputs: Arrays
    outputs: Arrays
    atol: float

    @property
    def dtype(self) -> str:
        return self.inputs["Q"].dtype.name

    def check(self, made: Arrays) -> None:
        """Raise AssertionError unless these are the expected outputs, in shape, dtype and value."""
        for name, expected in self.outputs.items():
            got = made[name]
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype), f"{name}: {got.shape}, {got.dtype}"
            # in float64, since NumPy does not compare bfloat16
            got, expected = got.astype(np.float64), expected.astype(np.float64)
            np.testing.assert_allclose(got, expected, ULPS[self.dtype], self.atol, equal_nan=False, err_msg=name)


def cases() -> list[Case]:
    """The cases of the `onnx` package. Those named `_expanded` are the same again, in simpler operators."""
    import onnx.backend.test.case.node as nodes
    import onnx.backend.test.case.node.attention  # noqa: F401  # fills the list of cases as it is imported
    from onnx.helper import get_attribute_value

    read = []
    for case in nodes._NodeTestCases:
        if case.name.startswith("test_attention_") and "_expanded" not in case.name:
            node = case.model.graph.node[0]
            attributes = {entry.name: get_attribute_value(entry) for entry in node.attribute}
            for values, answers in case.data_sets:
                inputs, outputs = (
                    dict(zip(filter(None, names), arrays, strict=True))
                    for names, arrays in ((node.input, values), (node.output, answers))
                )
                read.append(Case(case.name, attributes, inputs, outputs, case.atol))
    return read


def run(case: Case, path: str) -> Arrays:
    """The outputs that a case expects, as headwise computes them on "plain", "array", "fused" or "explicit"."""
    made = attention(path, **{name.lower(): array for name, array in case.inputs.items()}, **case.attributes)
    return {name: made[name]() for name in case.outputs}


def attention(
    path: str,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    attn_mask: np.ndarray | None = None,
    past_key: np.ndarray | None = None,
    past_value: np.ndarray | None = None,
    nonpad_kv_seqlen: np.ndarray | None = None,
    *,
    q_num_heads: int = 0,
    kv_num_heads: int = 0,
    is_causal: int = 0,
    left_window_size: int = -1,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    qk_matmul_output_mode: int = 0,
) -> dict[str, Callable[[], np.ndarray]]:
    """The operator. Every input and attribute of the schema is a parameter, so that an unknown one is an error.

    The outputs come as functions without arguments: a case computes those that it asks for.
    """
    wrap = _wrapper(path, double=softmax_precision == DOUBLE)
    joined = q.ndim == 3
    if joined:
        q, k, v = _split(q, q_num_heads), _split(k, kv_num_heads), _split(v, kv_num_heads)
    n_past = 0 if past_key is None else past_key.shape[2]
    T, S = q.shape[2], n_past + k.shape[2]
    if past_key is not None and past_value is not None:
        k, v = np.concatenate([past_key, k], 2), np.concatenate([past_value, v], 2)
    keys, values = wrap(k), wrap(v)
    offset = n_past if nonpad_kv_seqlen is None else wrap(nonpad_kv_seqlen - T)
    parts: list[hw.Mask] = []
    if attn_mask is not None:
        parts.append(_given_mask(attn_mask, S, wrap))
    if is_causal:
        parts.append(hw.Causal(offset=offset))
    if (left_window_size, right_window_size) != (-1, -1):
        left, right = (None if size == -1 else size for size in (left_window_size, right_window_size))
        parts.append(hw.Window(left, right, offset=offset))
    if nonpad_kv_seqlen is not None:
        parts.append(hw.Lengths(wrap(nonpad_kv_seqlen)))
    mask = reduce(and_, parts) if parts else None
    options = {"scale": scale, "softcap": softcap or None}

    def y() -> np.ndarray:
        compute = (lambda *a, **b: hw.trace(*a, **b).out) if path == "explicit" else hw.attend
        out = _numpy(compute(wrap(q), keys, values, mask=mask, **options), q.dtype)
        return out.transpose(0, 2, 1, 3).reshape(out.shape[0], T, -1) if joined else out

    def qk_matmul_output() -> np.ndarray:
        # Modes 0 and 1 lie before the mask. Headwise never reads a key that the mask forbids to all, so it gets none.
        seen = mask if qk_matmul_output_mode >= 2 else None
        steps = hw.trace(wrap(q), keys, values, mask=seen, **options)
        return _numpy(getattr(steps, QK_STEPS[qk_matmul_output_mode]), q.dtype)

    return {
        "Y": y,
        "present_key": lambda: _numpy(keys, k.dtype),
        "present_value": lambda: _numpy(values, v.dtype),
        "qk_matmul_output": qk_matmul_output,
    }


def _split(x_btm: np.ndarray, n_heads: int) -> np.ndarray:
    """(B,T,heads*width) -> (B,heads,T,width)."""
    B, T, width = x_btm.shape
    return x_btm.reshape(B, T, n_heads, width // n_heads).transpose(0, 2, 1, 3)


def _given_mask(mask: np.ndarray, S: int, wrap: Callable[[np.ndarray], Any]) -> hw.Mask:
    """attn_mask, whose last axis may be shorter than the keys: the schema forbids the keys beyond it."""
    boolean = mask.dtype == bool
    beyond = [(0, 0)] * (mask.ndim - 1) + [(0, S - mask.shape[-1])]
    padded = np.pad(mask, beyond, constant_values=False if boolean else -np.inf)
    return hw.Allowed(wrap(padded)) if boolean else hw.Bias(wrap(padded))


def _wrapper(path: str, double: bool) -> Callable[[np.ndarray], Any]:
    """What turns an array into the path's own kind. A softmax in float64 is had by floats that are float64.

    NumPy itself has no bfloat16; `onnx` gives the type of ml_dtypes, with which NumPy's own functions do not all work,
    and which torch does not read. float32 holds each of its values exactly.
    """

    def wrap(array: np.ndarray) -> Any:
        brain = array.dtype.name == "bfloat16"
        if brain:
            array = array.astype(np.float32)
        if double and array.dtype.kind == "f":
            array = array.astype(np.float64)
        if path == "plain":
            return array.tolist()
        if path == "array":
            return array
        tensor = torch.tensor(array)
        return tensor.bfloat16() if brain and not double else tensor

    return wrap


def _numpy(values: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Lists, arrays and tensors as an array of the operator's type."""
    if isinstance(values, torch.Tensor):
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asarray(values, dtype)
