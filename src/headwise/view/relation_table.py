"""Relations in the terminal: the heads that follow each of them best, beside the controls; and one sentence a head."""

from __future__ import annotations

from rich.console import Console

from headwise.heads.profiles import Followed, HeadProfile, Relation, Survey
from headwise.intervals import Interval
from headwise.markup import number
from headwise.view.sentences import head_sentence
from headwise.view.tables import print_table, say

BEST = 2  # heads of a relation that are shown
HEADINGS = ("relation", "head", "mass", "95 %", "even", "untr.", "else.", "right", "offset")


def best_heads(survey: Survey, relation: Relation, most: int = BEST) -> list[tuple[HeadProfile, Followed]]:
    """The heads whose mass on the right tokens lies highest above their controls, best first."""
    heads = [(head, head.relations[relation.name]) for head in survey.profiles if relation.name in head.relations]
    return sorted(heads, key=lambda pair: -pair[1].lead)[:most]


def relation_rows(survey: Survey) -> list[list[str]]:
    """For each relation its best heads: a cell for each of `HEADINGS`; a head with the role has a star."""
    rows = []
    for relation in survey.relations:
        for head, score in best_heads(survey, relation):
            star = "*" if relation.name in head.roles else ""
            controls = [number(value, 2) for value in (score.even, score.untrained, score.elsewhere)]
            offset = f"{relation.offset}: {number(relation.offset_accuracy, 2)}"
            mass = [number(score.mass.mean, 2), span(score.mass)]
            rows.append(
                [relation.name, head.name + star, *mass, *controls, number(score.accuracy.mean, 2), offset],
            )
    return rows


def span(value: Interval) -> str:
    """The interval, `0.64-0.89`; a dash where one document gives none."""
    return f"{number(value.low, 2)}-{number(value.high, 2)}" if abs(value.low) + abs(value.high) < 1e9 else "-"


def print_relations(console: Console, survey: Survey) -> None:
    """The best heads of each relation, and what the columns mean; nothing where no relation is known."""
    if not survey.relations:
        return
    print_table(console, "what belongs together", HEADINGS, relation_rows(survey), words=(0, 1))
    say(
        console,
        "mass: weight on the right tokens, with its 95 % interval; even: that of attention spread evenly; untr.: of "
        "the best untrained head; else.: of the same head at the same distances from other tokens; right: tokens whose "
        "largest weight is on a right one; offset: the best fixed distance, and how often it is right; *: has the role",
    )


def print_sentences(console: Console, survey: Survey, lang: str = "en") -> None:
    """A line for each head, its tokens in quotation marks."""
    say(console, "")
    for profile in survey.profiles:
        sentence = head_sentence(survey, profile, lang, ("“", "”"))
        say(console, f"{profile.name}: {sentence}")
