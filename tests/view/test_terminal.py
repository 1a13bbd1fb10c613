"""The maps in the terminal: right cells, plain text in a pipe, nothing in a token taken for markup."""

import numpy as np
from rich.cells import cell_len
from surveys import maps_of
from terminals import printed, printed_in_ascii

from headwise.records import HeadMap, HeadMaps
from headwise.view.terminal import block_maximum, print_maps, visible


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
        return next(line for line in printed(print_maps, maps_of(), width=width).splitlines() if "L0.H0" in line).count(
            ".H"
        )

    # 14 columns of labels, then 7 for a picture and 3 for each gap.
    assert [names_in_first_band(width) for width in (30, 31, 40, 41, 70, 71)] == [1, 2, 2, 3, 5, 6]
    text = printed(print_maps, maps_of(), force_terminal=True, color_system="truecolor", no_color=False)
    assert "▀" in text and "\x1b[38;2;" in text
    assert sum("▀" in line for line in text.splitlines()) == 4  # 7 rows in pairs, all six heads in one band of 80
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
    assert "#" in printed_in_ascii(print_maps, maps_of(tokens=("é", "a much longer token", " he", "d", "e", "f", "g")))
    text = printed(print_maps, one_map(np.eye(3).tolist(), ("日本語日本語日本語", "é", "ab")))
    starts = [cell_len(line[: line.index("█")]) for line in text.splitlines() if "█" in line and "from" not in line]
    assert starts == [14, 15, 16]
    assert visible("a\tb") == "a⇥b"
    assert visible("\u202e\u2028\u00a0\ud800") == "<U+202E><U+2028><U+00A0><U+D800>"
    family = "👩\u200d👧"
    assert visible(family) == family
    assert max(map(len, printed(print_maps, maps_of(), width=1).splitlines())) == 1
