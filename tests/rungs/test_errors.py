"""Bad input gives a HeadwiseError that says the fact, with the numbers of both sides, in words that are held here."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from cases import every, refuses
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


SHAPES = {
    "batch": ({"k": zeros(4, 3, 7, 11)}, "batch sizes differ: q has 2, k has 4, v has 2"),
    "batch of v": ({"v": zeros(1, 3, 7, 13)}, "batch sizes differ: q has 2, k has 2, v has 1"),
    "head width": (
        {"k": zeros(2, 3, 7, 5)},
        "q has head width 11, k has 5; a score is their dot product, so they must be equal",
    ),
    "kv heads of v": (
        {"v": zeros(2, 2, 7, 13)},
        "k has 3 heads of 7 keys, v has 2 heads of 7; each key needs its value",
    ),
    "keys of v": ({"v": zeros(2, 3, 5, 13)}, "k has 3 heads of 7 keys, v has 3 heads of 5; each key needs its value"),
    "heads not divided": (
        {"k": zeros(2, 5, 7, 11), "v": zeros(2, 5, 7, 13)},
        "5 key/value heads do not divide 6 query heads; pass kv_index= to map them",
    ),
    "more kv heads": (
        {"k": zeros(2, 12, 7, 11), "v": zeros(2, 12, 7, 13)},
        "12 key/value heads do not divide 6 query heads; pass kv_index= to map them",
    ),
    "rank of k": (
        {"k": zeros(2, 3, 7)},
        "k has shape (2, 3, 7), 3 axes; attention takes 4: (B,G,S,D); split the heads first, or add the missing axis",
    ),
    "rank of q": (
        {"q": zeros(2, 3)},
        "q has shape (2, 3), 2 axes; attention takes 4: (B,H,T,D); split the heads first, or add the missing axis",
    ),
    "rank of v": (
        {"v": zeros(2, 3, 7, 13, 1)},
        "v has shape (2, 3, 7, 13, 1), 5 axes; attention takes 4: (B,G,S,E); "
        "split the heads first, or add the missing axis",
    ),
}


@one_path
@pytest.mark.parametrize(("changes", "message"), SHAPES.values(), ids=SHAPES)
def test_shapes(changes: dict, message: str, path: str) -> None:
    assert_refused(path, message, **changes)


@pytest.mark.parametrize("path", PATHS[1:])
def test_width_zero(path: str) -> None:
    assert_refused(path, "q and k have head width 0", q=zeros(2, 6, 5, 0), k=zeros(2, 3, 7, 0))


@pytest.mark.parametrize("path", PATHS[1:])
def test_a_batch_axis_may_be_missing_on_lists_only(path: str) -> None:
    with pytest.raises(hw.HeadwiseError, match=r"^q has shape \(6, 5, 11\), 3 axes; attention takes 4: \(B,H,T,D\)"):
        call(path, q=zeros(6, 5, 11), k=zeros(3, 7, 11), v=zeros(3, 7, 13))


OPTIONS = {
    "kv_index too short": ({"kv_index": [0, 1]}, "kv_index has 2 entries for 6 query heads; one for each is needed"),
    "kv_index too long": ({"kv_index": [0] * 7}, "kv_index has 7 entries for 6 query heads; one for each is needed"),
    "kv_index too high": (
        {"kv_index": [0, 1, 2, 3, 0, 1]},
        "kv_index names key/value head 3; there are 3, counted from 0",
    ),
    "kv_index negative": (
        {"kv_index": [0, 1, 2, -1, 0, 1]},
        "kv_index names key/value head -1; there are 3, counted from 0",
    ),
    "sink of kv heads": ({"sink": zeros(3)}, "sink has shape (3,); 6 query heads need shape (6,)"),
    "sink of two axes": ({"sink": zeros(6, 1)}, "sink has shape (6, 1); 6 query heads need shape (6,)"),
    "sink of one number": ({"sink": 0.5}, "sink has shape (); 6 query heads need shape (6,)"),
    "gate": ({"gate": zeros(2, 6)}, "gate has shape (2, 6); 6 query heads need shape (6,)"),
    "softcap 0": ({"softcap": 0.0}, "softcap=0.0 is not positive; pass None for no cap"),
    "softcap negative": ({"softcap": -3.0}, "softcap=-3.0 is not positive; pass None for no cap"),
}


@one_path
@pytest.mark.parametrize(("changes", "message"), OPTIONS.values(), ids=OPTIONS)
def test_options(changes: dict, message: str, path: str) -> None:
    assert_refused(path, message, **changes)


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
MASKS = {
    "lengths beyond S": (lambda: hw.Lengths([3, 8]), "Lengths has 8; with S=7 keys a length lies in 0 to 7"),
    "lengths negative": (lambda: hw.Lengths([-1, 3]), "Lengths has -1; with S=7 keys a length lies in 0 to 7"),
    "lengths of another batch": (lambda: hw.Lengths([1, 2, 3]), "Lengths has shape (3,); this call needs (B) = (2,)"),
    "one length": (lambda: hw.Lengths(3), "Lengths has shape (); this call needs (B) = (2,)"),
    "sinks negative": (lambda: hw.Streaming(-1, 3), f"Streaming sinks=-1: {WHOLE}"),
    "window beyond all": (lambda: hw.Streaming(0, 2**61), f"Streaming window=2305843009213693952: {WHOLE}"),
    "window a fraction": (lambda: hw.Streaming(0, 1.5), f"Streaming window=1.5: {WHOLE}"),
    "windows of other heads": (
        lambda: hw.Streaming(0, [1, 2, 3]),
        "Streaming window has shape (3,); this call needs (H) = (6,)",
    ),
    "segments without batch": (
        lambda: hw.Segments([0] * 5, [0] * 7),
        "Segments q_ids has shape (5,); this call needs (B,T) = (2, 5)",
    ),
    "segments of T keys": (
        lambda: hw.Segments([[0] * 5] * 2, [[0] * 5] * 2),
        "Segments kv_ids has shape (2, 5); this call needs (B,S) = (2, 7)",
    ),
    "offsets": (lambda: hw.Causal(offset=[0, 1, 2]), "Causal offset has shape (3,); this call needs (B) = (2,)"),
    "offsets of a window": (
        lambda: hw.Window(1, 1, offset=[0]),
        "Window offset has shape (1,); this call needs (B) = (2,)",
    ),
    "offsets of alibi": (lambda: hw.Alibi(offset=[0]), "Alibi offset has shape (1,); this call needs (B) = (2,)"),
    "slopes": (lambda: hw.Alibi([0.5] * 3), "Alibi slopes has shape (3,); this call needs (H) = (6,)"),
    "allowed": (
        lambda: hw.Allowed(np.ones((7, 5), bool)),
        "Allowed has shape (7, 5), which does not broadcast to (B,H,T,S) = (2, 6, 5, 7)",
    ),
    "allowed of kv heads": (
        lambda: hw.Allowed(np.ones((3, 1, 1), bool)),
        "Allowed has shape (3, 1, 1), which does not broadcast to (B,H,T,S) = (2, 6, 5, 7)",
    ),
    "bias": (
        lambda: hw.Bias(np.zeros((2, 5, 7))),
        "Bias has shape (2, 5, 7), which does not broadcast to (B,H,T,S) = (2, 6, 5, 7)",
    ),
    "bias of five axes": (
        lambda: hw.Bias(np.zeros((1, 1, 1, 1, 1))),
        "Bias has shape (1, 1, 1, 1, 1), which does not broadcast to (B,H,T,S) = (2, 6, 5, 7)",
    ),
}


@one_path
@pytest.mark.parametrize("joined", [False, True], ids=["alone", "joined"])
@pytest.mark.parametrize(("mask", "message"), MASKS.values(), ids=MASKS)
def test_masks_that_do_not_fit(mask, message: str, joined: bool, path: str) -> None:
    assert_refused(path, message, mask=hw.Window(3, None) & mask() if joined else mask())


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
