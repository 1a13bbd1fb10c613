"""Heads that align: the path against an exhaustive search, choices on maps built by hand, a head that is planted."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import refuses_table
from planted import V as WORDS
from planted import hand_made
from torch import nn

import headwise as hw
from headwise.heads import align as alignment
from headwise.heads.align import Linked, Spoken, align, halves, path_starts


def paths(n: int, m: int) -> Iterator[list[tuple[int, int]]]:
    """Every monotone path from the first cell to the last."""

    def further(path: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        i, j = path[-1]
        if (i, j) == (n - 1, m - 1):
            yield path
        for a, b in ((i + 1, j + 1), (i + 1, j), (i, j + 1)):
            if a < n and b < m:
                yield from further([*path, (a, b)])

    return further([(0, 0)])


@pytest.mark.parametrize(("n", "m"), [(3, 5), (5, 3), (4, 4), (1, 5), (5, 1)])
def test_the_path_is_the_best_of_all(n: int, m: int) -> None:
    maps = np.random.default_rng(n).normal(size=(7, n, m)).astype(np.float32)
    starts = path_starts(maps)
    for scores, first in zip(maps, starts, strict=True):
        best = max(paths(n, m), key=lambda path: sum(float(scores[cell]) for cell in path))
        assert first.tolist() == [min(j for i, j in best if i == row) for row in range(n)]


class Told(nn.Module):
    """Stands for a model: its maps are put in place of those that a run would give."""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`align` on maps that are handed in, of heads L0.H0, L0.H1, ..."""

    def run(texts: list[Any], judged: list[Any], maps: dict[int, np.ndarray[Any, Any]], **options: Any) -> Any:
        site: Any = type("Site", (), {"heads": [f"cross.L0.H{h}" for h in range(len(next(iter(maps.values()))))]})()
        monkeypatch.setattr(alignment, "_maps", lambda model, text: {site: maps[id(text)]})
        return align(Told(), texts, judged, **options)

    return run


def spoken(begins: tuple[float, ...], n_keys: int) -> Spoken:
    rows = tuple(range(2, 2 + len(begins) + 1))  # and the row that predicts the end
    return Spoken({}, rows, tuple(range(len(begins))), begins, 0.02, n_keys)


def speech_maps(text: Spoken, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Head 0 looks anywhere, head 1 at the words two frames late, head 2 at the words, head 3 before them."""
    n, m = len(text.rows), text.n_keys
    ends = [*(round(begin / 0.02) for begin in text.begins), m - 5, m]
    maps = rng.random((4, n, m)).astype(np.float32)
    for head, shift in ((1, 2), (2, 0), (3, -11)):
        for row in range(n):
            maps[head, row, max(0, ends[row] + shift) : max(0, ends[row + 1] + shift)] += 29
    return maps / maps.sum(-1, keepdims=True)


def test_the_head_that_follows_the_words_is_chosen_and_judged_on_others(told: Any) -> None:
    rng = np.random.default_rng(5)
    texts = [spoken((0.0, 0.3, 0.72, 1.1 + 0.02 * i), 97) for i in range(7)]
    maps = {id(text): speech_maps(text, rng) for text in texts}
    found = told(texts[:4], texts[4:], maps, named=["cross.L0.H1"])
    assert [each.heads[0] for each in found.ranking][:2] == ["cross.L0.H2", "cross.L0.H1"]
    assert found.ranking[0].error.mean <= 0.02 and found.ranking[0].error.n == 4
    assert found.chosen.heads[0] == "cross.L0.H2" and found.chosen.error.n == 3
    assert found.alignment_heads[0][0] == 0 and [0, 2] in found.alignment_heads
    assert found.controls["named: cross.L0.H1"].heads == ("cross.L0.H1",) and found.chosen.within[0].n == 3
    assert found.controls["straight line"].within[0].mean < found.chosen.within[0].mean == 1
    assert found.n_texts == (4, 3) and "chosen: cross.L0.H2" in found.table().text()


def test_two_heads_that_err_apart_do_better_together(told: Any) -> None:
    """Each looks at half of the words; the greedy choice takes both, and no more of those that add nothing."""
    text = Linked({}, tuple((row, row + 3) for row in range(8)))
    maps = np.full((5, 8, 13), 0.01, np.float32)
    for row in range(8):
        maps[row % 2, row, row + 3] = 1
    found = told([text], [text], {id(text): maps})
    assert set(found.chosen.heads) == {"cross.L0.H0", "cross.L0.H1"}
    assert found.chosen.error.mean == 0 and found.chosen.within[0].mean == 1
    assert found.ranking[0].error.mean == pytest.approx(0.5) and found.kind == "linked"
    others = replace(found, chosen=replace(found.chosen, heads=("encoder.L3.H5", "cross.L3.H2", "cross.L0.H7")))
    assert others.alignment_heads == [[0, 7], [3, 2]]


def test_heads_of_self_attention_are_ranked_alone_and_those_of_a_context_too() -> None:
    # Without cross attention heads of self attention are ranked; L0.H0 looks at the token before, as the links do.
    model = hand_made()
    texts = []
    for seed in range(5):
        ids = torch.randint(WORDS, (1, 17), generator=torch.Generator().manual_seed(seed))
        texts.append(Linked({"input_ids": ids}, tuple((row, row - 1) for row in range(1, 17))))
    found = align(model, texts[:3], texts[3:])
    assert found.ranking[0].heads == ("L0.H0",) and found.ranking[0].error.mean == 0
    assert found.ranking[1].error.mean > 0.3
    assert found.chosen.heads == ("L0.H0",) and found.alignment_heads == [[0, 0]]
    torch.manual_seed(2)
    text = Linked({"x": torch.randn(1, 5, 24), "memory": torch.randn(1, 7, 24)}, ((1, 6), (4, 2)))
    found = align(Crossed(), [text], [text])
    assert {scored.heads[0] for scored in found.ranking} == {"L1.H0", "L1.H1"}


def test_errors_and_what_is_held_apart(told: Any) -> None:
    # Of four links two are found, by three rows, one of which has two: twice 2 of the 3 found and 4 right.
    maps = np.eye(3, 5, dtype=np.float32)[None]
    text = Linked({}, ((0, 0), (1, 1), (2, 3), (2, 4)))
    found = told([text], [text], {id(text): maps})
    assert found.chosen.error.mean == pytest.approx(1 - 4 / 7) and found.chosen.within[0].mean == 0.5
    texts = [Linked({}, ((n, n),)) for n in range(7)]
    for n in (2, 7):
        chosen_by, judged = halves(texts[:n])
        assert len(judged) == n // 2 and sorted(t.links for t in (*chosen_by, *judged)) == [t.links for t in texts[:n]]


class Crossed(nn.Module):
    """Layers of ours, of which one reads a context: only its call says that it crosses."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = hw.MultiHeadAttention(24, 3), hw.MultiHeadAttention(24, 2)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.cross(self.own(x), context=memory)
        return result


def test_what_aligns_with_nothing_is_refused() -> None:
    text = Linked({"input_ids": torch.arange(5)[None]}, ((1, 0),))
    refuses_table("aligned", globals() | {"model": hand_made(), "text": text})
