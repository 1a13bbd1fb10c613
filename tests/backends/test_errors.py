"""Bad input gives a HeadwiseError that says the fact, with the numbers of both sides, in words that are held here."""

from typing import Any

import numpy as np
import pytest
import torch
from cases import every, refuses, refuses_table
from helpers import NATIVE, PATHS, Sizes, draw

import headwise as hw

N = Sizes(B=2, H=6, G=3, T=5, S=7, D=11, E=13)
one_path = every("path", PATHS)


def call(path: str, **changes: Any) -> Any:
    """A sound call with something changed; NumPy arrays become the path's own kind."""
    wrap = NATIVE[path]
    is_own = {name: isinstance(x, np.ndarray) and name != "mask" for name, x in changes.items()}
    changes = {name: wrap(x) if is_own[name] else x for name, x in changes.items()}
    arguments = {**draw(N).arguments(wrap), **changes}
    return hw.trace(**arguments) if path == "explicit" else hw.attend(**arguments)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape)


TABLES = [(table, path) for table in ("shapes", "options") for path in PATHS]
TABLES += [("arrays", path) for path in PATHS[1:]] + [("tensors", path) for path in PATHS[2:]] + [("kinds", "")]


@every("table, path", TABLES)
def test_what_does_not_fit(table: str, path: str) -> None:
    refuses_table(table, globals() | {"path": path, "np": np, "torch": torch}, exact=True)


@one_path
@pytest.mark.parametrize("joined", [False, True], ids=["alone", "joined"])
def test_masks_that_do_not_fit(joined: bool, path: str) -> None:
    def masked(mask: hw.Mask) -> Any:
        return call(path, mask=hw.Window(3, None) & mask if joined else mask)

    refuses_table("masks", globals() | {"masked": masked}, exact=True)


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
