"""Tables on a narrow console: every number of the wide table is in the narrow one, whole, and so is every heading.

And what `share` and `prune` print: what was lost and won, and which weights healing kept.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
from cases import every, rows
from surveys import survey_of
from terminals import printed

from headwise import cost
from headwise.cli.reshape import print_curve, print_damage, print_reshaped
from headwise.cost import PRESETS, price
from headwise.reshape.heal import Damage, HealPoint, Pair
from headwise.reshape.job import Reshaped
from headwise.table import Table, say
from headwise.view import Screen
from headwise.view.cost import print_models, print_price, print_variants
from headwise.view.survey import print_survey

Draw = Callable[[Screen], None]


def price_of(name: str, screen: Screen) -> None:
    _, shape = cost.shape_of(name)
    setting = cost.make_setting(shape, batch=3, memory="2TB")
    print_price(screen, cost.price_shape(name, shape, setting))
    print_variants(screen, setting, cost.variants(shape, setting))


CURVE = tuple(HealPoint(100 * n, 102_400 * n, 1.5, 4.125 - n / 8, 0.0625 / (n + 1)) for n in range(5))
DAMAGE = Damage(
    loss=Pair(1.25, 1.5), kl=0.125, cache_bytes=Pair(512, 128),
    parameters=Pair(1_234_567, 1_234_567), context=4096,
)  # fmt: skip

VIEWS: dict[str, Draw] = {
    "survey": lambda screen: print_survey(screen, survey_of(3, 5)),
    "price": lambda screen: price_of("gemma-3-27b", screen),
    "latent": lambda screen: price_of("deepseek-v3", screen),
    "models": lambda screen: print_models(screen, [price(name) for name in PRESETS]),
    "damage": lambda screen: print_damage(screen, "Before any training", DAMAGE),
    "healing": lambda screen: print_curve(screen, CURVE),
    "plain": lambda screen: Table(
        ("", *map(str, range(31))), [[f"row {n}", *(f"{n},{k:03}" for k in range(31))] for n in range(3)], "Many"
    ).print(screen),
}


def drawn(draw: Draw, width: int) -> list[str]:
    return printed(draw, width=width).splitlines()


def words(lines: list[str]) -> set[str]:
    """Numbers and headings; a longer word in a column of words may be folded."""
    parts = set(re.findall(r"[^\s,;:()│─]+(?:,\d+)*", " ".join(lines)))
    return {word for word in parts if len(word) <= 12 or any(letter.isdigit() for letter in word)}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_digit_is_cut_and_no_column_vanishes(name: str, width: int) -> None:
    narrow = drawn(VIEWS[name], width)
    assert max(map(len, narrow)) <= width
    assert words(drawn(VIEWS[name], 500)) <= words(narrow)


def test_consoles_of_any_width() -> None:
    def digits(width: int) -> list[str]:
        return sorted("".join(re.findall(r"\d", " ".join(drawn(VIEWS["plain"], width)))))

    assert set(digits(9)) == set(digits(500)) and len(digits(9)) >= len(digits(500))
    lines = drawn(VIEWS["plain"], 500)
    assert sum(line.startswith("Many") for line in lines) == 1
    assert sum(line.startswith("Many") for line in drawn(VIEWS["plain"], 60)) > 2


def test_a_terminal_wraps_paragraphs_between_words_and_a_pipe_does_not() -> None:
    line = " ".join(["previous"] * 20)
    for terminal, widest in ((True, 59), (False, len(line))):
        lines = printed(say, line, width=60, soft_wrap=True, force_terminal=terminal).splitlines()
        assert set(" ".join(lines).split()) == {"previous"} and max(map(len, lines)) <= widest


def test_every_way_out_escapes_words() -> None:
    table = Table(("<a|", "n"), [("*b*", 12345), ("&c", 0.25)])
    row = '<tr><th scope="row">*b*</th><td>12,345</td></tr><tr><th scope="row">&amp;c</th><td>0.25</td></tr>'
    assert table.html().endswith(
        f'<th scope="col">&lt;a|</th><th scope="col">n</th></tr></thead><tbody>{row}</tbody></table>'
    )
    assert table.csv() == "<a|,n\n*b*,12345\n&c,0.25\n"
    assert table.text(40).split() == ["<a|", "n", "─" * 11, "*b*", "12,345", "&c", "0.25"]


def test_the_rows_of_damage() -> None:
    text = printed(print_damage, "Before any training", DAMAGE)
    for number in ("+0.2500", "0.1250", "x 0.25", "same", "1,234,567"):
        assert number in text


@every("distances, sentence", rows("healed"))
def test_which_weights_were_kept_is_said(distances: list[float], sentence: str) -> None:
    curve = tuple(HealPoint(3 * n, 0, None, None, distance) for n, distance in enumerate(distances))
    model: Any = None
    reshaped = Reshaped(model, "a", "b", "what", (), {}, (), DAMAGE, curve, DAMAGE, "read back")
    text = "\n".join(map(str.rstrip, drawn(lambda screen: print_reshaped(screen, reshaped), 100)))
    assert sentence in text
    assert reshaped.document()["damage"]["cache_bytes"] == {"before": 512, "after": 128}
    assert "model" not in reshaped.document()
