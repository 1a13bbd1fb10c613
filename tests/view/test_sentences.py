"""One sentence a head: it says what the numbers say, in both languages."""

from dataclasses import replace

import pytest
from cases import every, refuses, rows
from surveys import broken_survey, survey_of
from terminals import printed

from headwise.heads.table import ROLES, Example, Followed, HeadProfile, Relation, Survey, relation_role
from headwise.intervals import Interval
from headwise.view.report import report_html
from headwise.view.survey import TELLING, head_sentence, print_relations, print_survey
from headwise.words import marked

PERSON = Relation("person", "at =, on the pronoun", "the verb corpus", 36, 36, 3, 0.67)


def head_of(survey: Survey, **changes: object) -> HeadProfile:
    return replace(survey.profiles[0], **{"roles": (), "ablation": None, **changes})  # type: ignore[arg-type]


def followed(mass: float, looks: str = "él", at: str = "write", weight: float = 0.97) -> Followed:
    interval = Interval(mass, mass - 0.05, mass + 0.05, 36)
    return Followed(interval, Interval(0.8, 0.7, 0.9, 36), 0.2, 0.3, 0.1, (looks, at, weight))


def change(mean: float, reach: float = 0.01) -> Interval:
    return Interval(mean, mean - reach, mean + reach, 36)


@every(
    "ablation, english, spanish",
    [(Interval(*each) if each else None, *said) for each, *said in rows("ablations")],
)
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
    assert line.split() == ["person", "L1.H2*", "0.90", "0.85-0.95", "0.20", "0.10", "0.30", "0.80", "3:", "0.67"]
    assert printed(print_relations, survey_of()) == ""
    text = printed(print_survey, survey, width=200)
    assert "L1.H2: At “él” it looks at “write” (0.97; person, 0.90 on average)." in text
    followed = next(head for head in survey.profiles if head.name == "L1.H2")
    assert "En *él* mira a *write* (0.97; persona, 0.90 en promedio)." in head_sentence(survey, followed, "es")


def test_a_relation_stands_in_the_report_as_a_role_does() -> None:
    html = report_html(labelled())
    assert "person" in html and "t =, on the pronoun" in html
