"""What views print and write: tables on a narrow console, prices, surveys, maps, damage, and a sentence a head."""

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import every, refuses, rows
from rich.cells import cell_len
from surveys import STATISTICS, broken_survey, maps_of, survey_of

from headwise import cost
from headwise.cli.reshape import print_curve, print_damage, print_reshaped
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.heads.steps import head_steps
from headwise.heads.table import ROLES, Example, Followed, HeadProfile, Relation, Survey, relation_role
from headwise.intervals import Interval
from headwise.records import HeadMap, HeadMaps, plain_data
from headwise.reshape.heal import Damage, HealPoint, Pair
from headwise.reshape.job import Reshaped
from headwise.table import Table, say
from headwise.view import Screen
from headwise.view.cost import print_price, print_variants
from headwise.view.report import report_html
from headwise.view.survey import TELLING, head_sentence, print_relations, print_survey
from headwise.view.terminal import print_maps, print_steps, visible
from headwise.words import marked

Draw = Callable[[Screen], None]


def price_of(name: str, screen: Screen) -> None:
    _, shape = cost.shape_of(name)
    setting = cost.make_setting(shape, batch=3, memory="2TB")
    print_price(screen, cost.price_shape(name, shape, setting))
    print_variants(screen, setting, cost.variants(shape, setting))


CURVE = tuple(HealPoint(100 * n, 102_400 * n, 4.125 - n / 8, 0.0625 / (n + 1)) for n in range(5))
DAMAGE = Damage(
    loss=Pair(1.25, 1.5), kl=0.125, cache_bytes=Pair(512, 128),
    parameters=Pair(1_234_567, 1_234_567), context=4096,
)  # fmt: skip

VIEWS: dict[str, Draw] = {
    "survey": lambda screen: print_survey(screen, survey_of(3, 5)),
    "price": lambda screen: price_of("gemma-3-27b", screen),
    "latent": lambda screen: price_of("deepseek-v3", screen),
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
    for number in ("+0.2500", "0.1250", "x 0.25", "x 1.00", "1,234,567"):
        assert number in text


@every("distances, sentence", rows("healed"))
def test_which_weights_were_kept_is_said(distances: list[float], sentence: str) -> None:
    curve = tuple(HealPoint(3 * n, 0, None, distance) for n, distance in enumerate(distances))
    model: Any = None
    reshaped = Reshaped(model, "a", "b", "what", (), {}, (), DAMAGE, curve, DAMAGE, "read back")
    text = "\n".join(map(str.rstrip, drawn(lambda screen: print_reshaped(screen, reshaped), 100)))
    assert sentence in text
    assert reshaped.document()["damage"]["cache_bytes"] == {"before": 512, "after": 128}
    assert "model" not in reshaped.document()


def printed_survey(survey: Survey, width: int = 80) -> str:
    return printed(print_survey, survey, width=width)


def table_rows(text: str) -> list[list[str]]:
    """The lines of the table, as words."""
    table = text.split("─\n")[-1] if "─\n" in text else text.split("─ \n")[-1]
    return [line.split() for line in table.splitlines() if re.match(r" ?([a-z]+\.)?L\d+\.H\d+ ", line)]


def names(text: str) -> list[str]:
    return [row[0] for row in table_rows(text)]


def test_rows_and_roles() -> None:
    survey = survey_of(3, 5)
    text = printed_survey(survey)
    assert names(text) == [profile.name for profile in survey.profiles]
    line, scores = table_rows(text)[1], survey.profiles[1].scores
    assert line[1:3] == [f"{scores['entropy'].mean:.3f}", f"{scores['distance'].mean:.1f}"]
    assert table_rows(text)[0][1] == "previous" and float(table_rows(text)[0][6]) == 0.95
    header = next(line for line in text.splitlines() if "entropy" in line)
    assert " ".join(header.split()) == "head roles entropy distance conf. first prev. import. ablation"
    text = printed_survey(survey_of(3, 5))
    assert re.search(r"^previous token +1  L0\.H0$", text, re.MULTILINE)
    assert re.search(r"^roles without a head: .*copying", text, re.MULTILINE)
    wide = survey_of(2, 9)
    many = printed_survey(replace(wide, profiles=tuple(replace(profile, roles=("self",)) for profile in wide.profiles)))
    assert re.search(r"^self +18  L0\.H0, .*L0\.H5 and 12 more$", many, re.MULTILINE)
    text = printed_survey(broken_survey(), width=120)
    assert "nan" not in text and "inf" not in text.replace("inference", "")
    survey = survey_of()
    bare = replace(survey, profiles=tuple(replace(p, importance=None, ablation=None) for p in survey.profiles))
    text = printed_survey(bare)
    assert "import." not in text and "ablation" not in text and "entropy" in text


def test_pipes_and_ascii() -> None:
    survey = survey_of(model="[red]m[/red] :smile:", notes=("A [bold]note[/bold].",))
    text = printed_survey(survey)
    assert "\x1b" not in text and "[red]m[/red] :smile:" in text and "A [bold]note[/bold]." in text
    assert "L1.H2" in printed_in_ascii(print_survey, survey_of())


def plain(survey: Any) -> dict[str, Any]:
    return json.loads(json.dumps(plain_data(survey), allow_nan=False))  # type: ignore[no-any-return]


def test_json_and_csv() -> None:
    survey = survey_of(2, 3, k=5)
    document = plain(survey)
    assert document["model"] == "toy" and document["tokens"] == list(survey.tokens)
    assert document["roles"][0]["name"] == survey.roles[0].name and document["untrained"] == survey.untrained
    for profile, stored in zip(survey.profiles, document["profiles"], strict=True):
        assert stored["name"] == profile.name and stored["roles"] == list(profile.roles)
        assert stored["scores"]["entropy"] == vars(profile.scores["entropy"])
        assert stored["importance"] == profile.importance
        assert np.abs(np.array(stored["shares"]) - profile.shares).max() <= 5e-7
        assert stored["top_keys"] == profile.top_keys.tolist()
    first, second, *_ = plain(broken_survey())["profiles"]
    assert first["scores"]["distance"] == {"mean": None, "low": None, "high": None, "n": 0}
    assert first["scores"]["self"] == {"mean": 0.5, "low": None, "high": None, "n": 1}
    assert first["ablation"] is None and second["importance"] is None and second["uniform"] == {"entropy": None}
    survey = survey_of(2, 3)
    lines = list(csv.DictReader(io.StringIO(Table.of(survey.records()).csv())))
    assert [line["name"] for line in lines] == [profile.name for profile in survey.profiles]
    for line, profile in zip(lines, survey.profiles, strict=True):
        assert (line["layer"], line["head"]) == (str(profile.layer), str(profile.head))
        for key in STATISTICS:
            cells = [float(line[name]) for name in (key, f"{key}_low", f"{key}_high")]
            assert cells == pytest.approx([profile.scores[key].mean, profile.scores[key].low, profile.scores[key].high])
        assert profile.ablation is not None and float(line["ablation_low"]) == pytest.approx(profile.ablation.low, 1e-6)
    assert lines[0]["roles"] == "previous token" and lines[0]["norm_uniform"] == ""
    assert float(lines[1]["entropy_uniform"]) == pytest.approx(0.021)
    first, second, *rest = csv.DictReader(io.StringIO(Table.of(broken_survey().records()).csv()))
    assert first["distance"] == "" and (first["self"], first["self_low"], first["self_high"]) == ("0.5", "", "")
    assert first["ablation"] == "" and second["importance"] == "" and second["distance"] == ""
    assert rest[-1]["part"] == "cross" and "nan" not in Table.of(broken_survey().records()).csv()


def test_no_cell_of_a_csv_is_run_by_a_spreadsheet() -> None:
    """Names of relations come from a file of anyone's; a number stays one, below 0 too."""
    for sign in "=+-@\t\r\n\uff1d":
        formula = f'{sign}HYPERLINK("http://x","y")'
        row = {
            "name": "L0.H0",
            f"{formula}_accuracy": -0.5,
            "roles": formula,
            "bare": -3,
            "none": None,
            "inside": "a=b",
        }
        head, cells = csv.reader(io.StringIO(Table.of([row]).csv(), newline=""))
        assert cells == ["L0.H0", "-0.5", f"'{formula}", "-3", "", "a=b"]
        assert head[:2] == ["name", f"'{formula}_accuracy"]


def one_map(weights: list[list[float]], tokens: tuple[str, ...]) -> HeadMaps:
    return HeadMaps("toy", tokens, (HeadMap(0, 0, np.array(weights, dtype=np.float32)),))


def test_shades_and_pipes() -> None:
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
    assert "the first 40 of 83 tokens" in text
    assert "the first" not in printed(print_maps, maps_of(length=37, layers=1, heads=1))


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


PERSON = Relation("person", "at =, on the pronoun", "the verb corpus", 36, 36)


def head_of(survey: Survey, **changes: object) -> HeadProfile:
    return replace(survey.profiles[0], **{"roles": (), "ablation": None, **changes})  # type: ignore[arg-type]


def followed(mass: float, looks: str = "él", at: str = "write", weight: float = 0.97) -> Followed:
    interval = Interval(mass, mass - 0.05, mass + 0.05, 36)
    return Followed(interval, Interval(0.8, 0.7, 0.9, 36), 0.2, 0.3, 0.1, (looks, at, weight))


def change(mean: float, reach: float = 0.01) -> Interval:
    return Interval(mean, mean - reach, mean + reach, 36)


@every("ablation, english, spanish", [(Interval(*each) if each else None, *said) for each, *said in rows("ablations")])
def test_a_labelled_role_and_what_is_lost(ablation: Interval | None, english: str, spanish: str) -> None:
    survey = survey_of()
    scores = {"translation": followed(0.76), "person": followed(0.54, "=", "he", 0.7)}
    head = head_of(survey, roles=("person", "translation", "self"), relations=scores, ablation=ablation)
    said = head_sentence(survey, head)
    assert said.startswith("At *él* it looks at *write* (0.97; translation, 0.76 on average).") and said.endswith(
        english
    )
    said = head_sentence(survey, head, "es")
    assert said.startswith("En *él* mira a *write* (0.97; traducción, 0.76 en promedio).") and said.endswith(spanish)


@pytest.mark.parametrize("lang", ["en", "es"])
def test_every_role_has_a_sentence_of_its_own_with_its_score(lang: str) -> None:
    assert set(TELLING) == {role.name for role in ROLES}
    survey = replace(survey_of(), roles=ROLES)
    said = set()
    for role in ROLES:
        score = Interval(0.4321, 0.4, 0.5, 7)
        head = head_of(survey, roles=(role.name,), scores={role.score: score})
        sentence = head_sentence(survey, head, lang)
        assert "0.43" in sentence, role.name
        said.add(sentence)
    assert len(said) == len(ROLES)
    both = head_of(survey, roles=("first token", "induction"), scores={"induction": change(0.7), "first": change(0.9)})
    assert "0.70" in head_sentence(survey, both, lang)


def test_sentences_of_heads() -> None:
    survey = survey_of()
    examples = (Example(3, 4, 3, " sea", "the", 0.31), Example(0, 2, 1, "a", "b", 0.2))
    head = head_of(survey, examples=examples)
    assert "none of the roles; it looks hardest from *sea* at *the* (0.31)." in head_sentence(survey, head)
    assert "desde *sea* hacia *the* (0.31)." in head_sentence(survey, head, "es")
    alone = head_of(survey, scores={"confidence": change(0.456)})
    assert head_sentence(survey, alone) == "It has none of the roles; its largest weight is 0.46 on average."
    silent = head_of(survey, scores={"norm": Interval(0.0, 0.0, 0.0, 3)})
    assert head_sentence(survey, silent, "es") == "Está callada: lo que añade es cero."
    refuses(lambda: head_sentence(survey, head, "fr"), r"^lang='fr' is not known; one of en, es$")
    for survey in (survey_of(3, 5), broken_survey()):
        for profile in survey.profiles:
            for lang in ("en", "es"):
                sentence = head_sentence(survey, profile, lang)
                assert sentence.endswith(".") and "{" not in sentence.replace("${data}", "") and "nan" not in sentence
    said = marked("sentence.strongest", "en", {"looks": "*", "at": "a*", "weight": "0.3"}, ("“", "”"))
    assert "from “*” at “a*” (0.3)" in said
    survey = survey_of()
    head = head_of(survey, roles=("{mine}",), relations={"{mine}": followed(0.6, "{a}", "*b*")})
    assert "(0.97; {mine}, 0.60 en promedio)" in head_sentence(survey, head, "es")
    assert "*{a}*" in head_sentence(survey, head) and "**b**" in head_sentence(survey, head)


def labelled() -> Survey:
    """Three heads of six follow the pronoun, the last of them best."""
    survey = survey_of(statistics={**survey_of().statistics, "person": "mass"}, relations=(PERSON,))
    profiles = [
        replace(head, relations={"person": followed(mass)}, scores=head.scores | {"person": followed(mass).mass})
        for head, mass in zip(survey.profiles, (0.1, 0.2, 0.15, 0.5, 0.3, 0.9), strict=True)
    ]
    profiles[-1] = replace(profiles[-1], roles=("person",))
    return replace(survey, profiles=tuple(profiles), roles=(relation_role(PERSON), *survey.roles))


def test_the_best_heads_of_a_relation() -> None:
    survey = labelled()
    lines = printed(print_relations, survey, width=99).splitlines()
    assert [line.split()[1].rstrip("*") for line in lines if line.split()[:1] == ["person"]] == ["L1.H2", "L1.H0"]
    line = next(line for line in printed(print_relations, survey, width=99).splitlines() if "L1.H2" in line)
    assert line.split() == ["person", "L1.H2*", "0.90", "0.85-0.95", "0.20", "0.10", "0.30", "0.80"]
    assert printed(print_relations, survey_of()) == ""
    text = printed(print_survey, survey, width=200)
    assert "L1.H2: At “él” it looks at “write” (0.97; person, 0.90 on average)." in text
    followed = next(head for head in survey.profiles if head.name == "L1.H2")
    assert "En *él* mira a *write* (0.97; persona, 0.90 en promedio)." in head_sentence(survey, followed, "es")


def test_a_relation_stands_in_the_report_as_a_role_does() -> None:
    html = report_html(labelled())
    assert "person" in html and "t =, on the pronoun" in html


def printed(draw: Callable[..., object], *arguments: Any, width: int = 80, **options: Any) -> str:
    """What `draw(screen, *arguments)` prints on a screen of this width; `options` are those of `Screen`."""
    file = io.StringIO()
    draw(Screen(file=file, width=width, **options), *arguments)
    return file.getvalue()


def printed_in_ascii(draw: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The same on 80 columns that have no other letters."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    draw(Screen(file=file, width=80, **options), *arguments)
    file.seek(0)
    return file.read()
