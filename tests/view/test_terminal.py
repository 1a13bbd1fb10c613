"""The maps in the terminal: right cells, plain text in a pipe, nothing in a token taken for markup."""

from dataclasses import replace

import numpy as np
import torch
from rich.cells import cell_len
from surveys import maps_of
from terminals import printed

from headwise.gpt.gpt import GPT, GPTConfig
from headwise.heads.steps import head_steps
from headwise.records import HeadMap, HeadMaps
from headwise.view.terminal import block_maximum, print_maps, print_steps, visible


def one_map(weights: list[list[float]], tokens: tuple[str, ...]) -> HeadMaps:
    return HeadMaps("toy", tokens, (HeadMap(0, 0, np.array(weights, dtype=np.float32)),))


def test_shades_blocks_and_pipes() -> None:
    text = printed(print_maps, one_map([[1, 0, 0], [0.3, 0.7, 0], [0.04, 0.5, 0.1]], ("a", "b", "c")))
    rows = [line[14:].rstrip() for line in text.splitlines() if line[:14].strip() in ("a", "b", "c")]
    assert rows == ["█", "▒█", " ▓░"]
    text = printed(print_maps, maps_of(), width=61)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 61
    assert all(f"L{layer}.H{head}" in text for layer in range(2) for head in range(3))

    def names_in_first_band(width: int) -> int:
        lines = printed(print_maps, maps_of(), width=width).splitlines()
        return next(line for line in lines if "L0.H0" in line).count(".H")

    # 14 columns of labels, then 7 for a picture and 3 for each gap.
    assert [names_in_first_band(width) for width in (30, 31, 40, 41, 70, 71)] == [1, 2, 2, 3, 5, 6]
    text = printed(print_maps, maps_of(length=83, layers=1, heads=1))
    assert "83 tokens: each cell is a block of 3 x 3, shown by its largest weight" in text
    assert "81-82" in text
    assert "block" not in printed(print_maps, maps_of(length=37, layers=1, heads=1))
    weights = np.zeros((7, 7), dtype=np.float32)
    weights[5, 2] = 0.9
    small = block_maximum(weights, 2)
    assert small.shape == (4, 4)
    assert small[2, 1] == np.float32(0.9) and np.count_nonzero(small) == 1


def test_letters_of_any_console() -> None:
    tokens = ("[red]", "\x1b[31m", "\n", " he", "")
    text = printed(print_maps, one_map(np.eye(5).tolist(), tokens))
    assert "[red]" in text and "<U+001B>[31m" in text and "⏎" in text and "␣he" in text and "∅" in text
    assert "\x1b" not in text
    text = printed(print_maps, one_map(np.eye(3).tolist(), ("日本語日本語日本語", "é", "ab")))
    starts = [cell_len(line[: line.index("█")]) for line in text.splitlines() if "█" in line and "from" not in line]
    assert starts == [14, 15, 16]
    assert visible("a\tb") == "a⇥b"
    assert visible("\u202e\u2028\u00a0\ud800") == "<U+202E><U+2028><U+00A0><U+D800>"
    family = "👩\u200d👧"
    assert visible(family) == family
    assert max(map(len, printed(print_maps, maps_of(), width=1).splitlines())) == 1


def test_the_steps_of_a_head_are_tables_of_its_record() -> None:
    torch.manual_seed(3)
    model = GPT(GPTConfig(vocab_size=11, context=7, n_layers=2, n_heads=3, d_model=57, head_dim=17, position="learned"))
    model.blocks[1].attention.o_proj.weight.data.mul_(29)  # type: ignore[union-attr,operator]
    steps = head_steps(model, [3, 1, 4, 1, 5], ("a", "\n", "[b]", "d", "é"), 1, 1, 3, "toy")
    text = printed(print_steps, steps, width=250)
    lines = [line.strip() for line in text.splitlines()]
    assert "L1.H1 at position 3 d, which may look at 4 of 5" in text and "(the first 16 of 17 numbers)" in text
    key = steps.keys[1]
    assert f"{key.dot:.4f} {key.score:.4f} {key.logit:.4f} {key.weight:.4f}" in " ".join(text.split())
    added = f"head 1, length {steps.norms[1]:.4f}"
    for label, vector in (("k of 2 [b]", steps.keys[2].key), (added, steps.added[1]), ("x + layer", steps.x_new)):
        shown = next(line.removeprefix(label).split() for line in lines if line.startswith(label))
        assert shown == [f"{value:.4f}" for value in vector[:16]], label
    assert "k of 4" not in text and "cap" not in text and "sink" not in text
    sunk = replace(steps, softcap=0.5, sink=0.25, sink_weight=0.125, gate=2.0)
    more = printed(print_steps, sunk, width=250)
    assert "cap 0.5" in more and "times the gate 2.0000" in more
    assert next(line.split() for line in more.splitlines() if "sink" in line) == ["sink", "0.2500", "0.1250"]
    nothing = printed(print_steps, replace(steps, keys=()), width=250)
    assert "which may look at 0 of 5" in nothing and "Values" not in nothing
