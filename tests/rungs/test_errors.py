"""Bad input gives a HeadwiseError that says the fact, with the numbers of both sides, in words that are held here."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from cases import every, refuses, refuses_table
from helpers import NATIVE, PATHS, Sizes, draw

import headwise as hw

N = Sizes(B=2, H=6, G=3, T=5, S=7, D=11, E=13)
one_path = every("path", PATHS)
torch_only = pytest.mark.parametrize("path", PATHS[2:])


def call(path: str, **changes: Any) -> Any:
    """A sound call with something changed; NumPy arrays become the path's own kind."""
    wrap = NATIVE[path]
    is_own = {name: isinstance(x, np.ndarray) and name != "mask" for name, x in changes.items()}
    changes = {name: wrap(x) if is_own[name] else x for name, x in changes.items()}
    arguments = {**draw(N).arguments(wrap), **changes}
    return hw.trace(**arguments) if path == "explicit" else hw.attend(**arguments)


def assert_refused(path: str, message: str, **changes: Any) -> None:
    refuses(lambda: call(path, **changes), f"^{re.escape(message)}$")


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape)


@one_path
def test_shapes(path: str) -> None:
    refuses_table("shapes", globals() | {"path": path}, exact=True)


@pytest.mark.parametrize("path", PATHS[1:])
def test_width_zero(path: str) -> None:
    assert_refused(path, "q and k have head width 0", q=zeros(2, 6, 5, 0), k=zeros(2, 3, 7, 0))


@pytest.mark.parametrize("path", PATHS[1:])
def test_a_batch_axis_may_be_missing_on_lists_only(path: str) -> None:
    with pytest.raises(hw.HeadwiseError, match=r"^q has shape \(6, 5, 11\), 3 axes; attention takes 4: \(B,H,T,D\)"):
        call(path, q=zeros(6, 5, 11), k=zeros(3, 7, 11), v=zeros(3, 7, 13))


@one_path
def test_options(path: str) -> None:
    refuses_table("options", globals() | {"path": path}, exact=True)


@one_path
def test_an_infinite_softcap(path: str) -> None:
    """inf * tanh(s / inf) is inf * 0: not a number, and not what was meant."""
    refuses(lambda: call(path, softcap=float("inf")), "softcap=inf")


@torch_only
@pytest.mark.parametrize("dropout", [1.0, 1.5, -0.1])
def test_dropout_out_of_range(dropout: float, path: str) -> None:
    assert_refused(path, f"dropout={dropout} is outside [0, 1)", dropout=dropout)


@pytest.mark.parametrize(("path", "kind"), [("plain", "nested lists"), ("array", "NumPy arrays")])
def test_dropout_needs_torch(path: str, kind: str) -> None:
    assert_refused(path, f"dropout=0.1 on {kind}: dropout needs the tensor rung; pass torch tensors", dropout=0.1)


WHOLE = "pass whole numbers from 0 on, one, or one for each head"


@one_path
@pytest.mark.parametrize("joined", [False, True], ids=["alone", "joined"])
def test_masks_that_do_not_fit(joined: bool, path: str) -> None:
    def masked(mask: hw.Mask) -> Any:
        return call(path, mask=hw.Window(3, None) & mask if joined else mask)

    refuses_table("masks", globals() | {"masked": masked}, exact=True)


@pytest.mark.parametrize(
    ("left", "right", "shown"), [(-1, 0, "left=-1"), (None, -2, "right=-2")], ids=["left", "right"]
)
def test_a_negative_window(left: int | None, right: int, shown: str) -> None:
    message = f"Window {shown} is negative; pass 0 or more, or None for an open side"
    refuses(lambda: hw.Window(left, right), f"^{message}$")


@pytest.mark.parametrize(
    "array", [[[1, 0]], [[1.0, 0.0]], np.ones(3), np.ones(3, int), torch.ones(3), torch.ones(3, dtype=torch.uint8)]
)
def test_allowed_refuses_numbers(array: Any) -> None:
    message = (
        "Allowed takes bool values, True = may attend, and got numbers; pass Bias(array) to add them to the scores"
    )
    refuses(lambda: hw.Allowed(array), f"^{re.escape(message)}$")


@pytest.mark.parametrize("array", [[[True]], [[1, 0]], np.ones(3, bool), np.ones(3, int), torch.ones(3) > 0])
def test_bias_refuses_bools_and_whole_numbers(array: Any) -> None:
    message = (
        "Bias takes float values that are added to the scores, and got bool or whole numbers; "
        "pass Allowed(array) for True = may attend"
    )
    refuses(lambda: hw.Bias(array), f"^{re.escape(message)}$")


@one_path
@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        ([[True] * 7] * 5, "list"),
        (np.ones((5, 7), bool), "ndarray"),
        (torch.ones(5, 7, dtype=torch.bool), "Tensor"),
        ("causal", "str"),
        (True, "bool"),
    ],
    ids=["list", "ndarray", "Tensor", "str", "bool"],
)
def test_a_bare_mask_names_both_meanings(mask: Any, kind: str, path: str) -> None:
    message = (
        f"mask is a bare {kind}, and its meaning is ambiguous; wrap it: "
        "Allowed(array) for bool with True = may attend, Bias(array) for float added to the scores"
    )
    if "bool" in str(getattr(mask, "dtype", "")):  # whose True other libraries read in two ways
        message += (
            "; True forbids in nn.MultiheadAttention (pass Allowed(~array)), allows in scaled_dot_product_attention"
        )
    assert_refused(path, message, mask=mask)


@pytest.mark.parametrize("mask", [[[True]], np.ones((5, 7), bool), torch.ones(5, 7)], ids=["list", "ndarray", "Tensor"])
def test_a_bare_mask_joined_to_a_mask_names_both_meanings(mask: Any) -> None:
    for join in (lambda: hw.Causal() & mask, lambda: mask & hw.Causal()):
        with pytest.raises(hw.HeadwiseError, match=r"Allowed\(array\).*Bias\(array\)"):
            join()


def test_mixed_kinds_are_refused() -> None:
    q, k, v = (np.zeros(shape) for shape in ((2, 6, 5, 11), (2, 3, 7, 11), (2, 3, 7, 13)))
    message = "q is on the array rung, k is on the tensor rung, v is on the plain rung; " + (
        "pass all three as lists, as NumPy arrays or as torch tensors"
    )
    refuses(lambda: hw.attend(q, torch.tensor(k), v.tolist()), f"^{message}$")
    arrays = [np.ones((1, 1, 2, 3))] * 3
    for place, name in enumerate("qkv"):
        mixed = [array.tolist() if n == place else array for n, array in enumerate(arrays)]
        with pytest.raises(hw.HeadwiseError, match=f"{name} is on the plain rung.*; pass all three as"):
            hw.attend(*mixed)


@pytest.mark.parametrize(("q", "kind"), [(None, "NoneType"), (3.0, "float"), ("q", "str"), ({}, "dict")])
def test_an_unknown_kind(q: Any, kind: str) -> None:
    refuses(lambda: hw.attend(q, q, q), rf"^q is {kind}; pass nested lists, a numpy\.ndarray or a torch\.Tensor$")


@torch_only
def test_dtypes_and_devices_that_differ(path: str) -> None:
    message = "dtypes differ: q is torch.float64, k is torch.float32, v is torch.float64; cast them to one"
    assert_refused(path, message, k=torch.zeros(2, 3, 7, 11))
    message = "dtypes differ: q is float64, k is float64, v is float16; cast them to one"
    assert_refused("array", message, v=np.zeros((2, 3, 7, 13), np.float16))
    arrays = {name: torch.tensor(getattr(draw(N), name)).long() for name in "qkv"}
    assert_refused(path, "q, k, v are torch.int64; attention needs floats: pass .float()", **arrays)
    arrays = {name: getattr(draw(N), name).astype(np.int32) for name in "qkv"}
    assert_refused("array", "q, k, v are int32; attention needs floats: pass .astype(numpy.float32)", **arrays)
    message = "devices differ: q is on cpu, k on meta, v on cpu; move them to one"
    assert_refused(path, message, k=torch.zeros(2, 3, 7, 11, dtype=torch.float64, device="meta"))


# --- things that would be dropped in silence ---


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("spoil", ["one row more", "one row less", "one number more", "one number less"])
def test_ragged_lists(spoil: str, name: str) -> None:
    """Lists may differ in length where arrays cannot; the odd one out is neither ignored nor a crash."""
    lists = getattr(draw(N), name).tolist()
    head = lists[1][2]
    if spoil == "one row more":
        head.append(list(head[0]))
    elif spoil == "one row less":
        head.pop()
    elif spoil == "one number more":
        head[1].append(0.0)
    else:
        head[1].pop()
    refuses(lambda: call("plain", **{name: lists}), f"^{name} ")


@one_path
def test_ragged_masks_and_broken_indices(path: str) -> None:
    refuses(lambda: call(path, mask=hw.Allowed([[True] * 7] * 4 + [[True] * 8])), "Allowed")
    refuses(lambda: call(path, kv_index=[0.6, 1.0, 2.0, 0.0, 1.0, 2.0]), "kv_index")
    refuses(lambda: call(path, mask=hw.Causal(offset=1.7)), "offset")
