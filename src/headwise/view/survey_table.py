"""A survey in the terminal: which head has which role, a line for each head, what belongs together."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from headwise.errors import HeadwiseError
from headwise.heads.table import HeadProfile, Survey
from headwise.markup import listed, number
from headwise.table import Table, say
from headwise.view.survey_words import (
    Column,
    both_names,
    columns_of,
    earners,
    head_sentence,
    label,
    mean_of,
    n_layers,
    notes_of,
    only_here,
    paired,
    short,
    value_of,
)
from headwise.words import Note, labelled, phrase, said, unknown

SHOWN = ("entropy", "distance", "confidence", "first", "previous", "importance", "ablation")
NAMED = 6  # heads that are named behind a role
LONG = 40  # characters of the name of a text, at most
EFFECTS = ("importance", "ablation")


def print_survey(
    console: Console, survey: Survey, sort_by: str = "name", against: Survey | None = None, lang: str = "en"
) -> None:
    """The roles with their heads, then a table with a line for each head.

    sort_by  "name" for the order of the model; or "importance", "ablation" or a statistic, the largest first and what
             has none last; a statistic that the table does not show gets a column
    against  numbers are then those of `survey` minus those of `against`, heads are matched by name, and the roles are
             those that only one of the two has, with + and -

    Raises HeadwiseError for an order that is not known.
    """
    key = check_order(survey.statistics, sort_by)
    if key in EFFECTS and all(value_of(profile, key) is None for profile in survey.profiles):
        raise HeadwiseError(f"cannot sort by {sort_by!r}: it was not measured for {survey.model}")
    known = {column.key: column for column in columns_of(survey, against)}
    keys = SHOWN if key in SHOWN else (key, *SHOWN)  # that by which it is sorted is among them
    columns = [known[name] for name in keys if name in known]
    say(console, _facts(survey, lang))
    if against is not None:
        say(console, _facts(against, lang))
    for note in notes_of(survey, against):
        say(console, said(note, lang))
    _print_roles(console, survey, lang)
    if against is not None:
        say(console, "\n" + phrase("survey.minus", lang, model=survey.model, other=against.model))
    _print_heads(console, survey, columns, key, against, lang)
    for model, names in only_here(survey, against):
        say(console, phrase("survey.only_in", lang, model=model, names=names))


def check_order(statistics: Iterable[str], sort_by: str) -> str:
    """The key that `sort_by` names: a statistic, an effect or "name", also by its label or by its heading in the table.

    Raises HeadwiseError for any other.
    """
    known = ("name", *EFFECTS, *statistics)
    keys = {labelled("heading", key): key for key in known}
    keys |= {label(key): key for key in known} | {key: key for key in known}
    if sort_by not in keys:
        raise unknown(Note.of("refused.no_order", name=repr(sort_by)), sort_by, keys)
    return keys[sort_by]


def _facts(survey: Survey, lang: str) -> str:
    names = [said(name, lang) for name in survey.texts]
    names = [name if len(name) <= LONG else f"{name[: LONG - 3]}..." for name in names]  # it may be a whole text
    facts = {"text": phrase("survey.of", lang, names=listed(names, NAMED)) if names else "", "loss": ""}
    if survey.loss is not None and math.isfinite(survey.loss):
        facts["loss"] = phrase("survey.loss", lang, loss=f"{survey.loss:.3f}")
    counts = {
        "heads": len(survey),
        "layers": n_layers(survey),
        "tokens": survey.n_tokens,
        "documents": survey.n_documents,
    }
    facts |= {name: f"{count:,}" for name, count in counts.items()}
    return phrase("survey.facts", lang, model=survey.model, **facts)


def _print_roles(console: Console, survey: Survey, lang: str) -> None:
    """A line for each role that heads have: how many, and which; then the others."""
    named = earners(survey)
    say(console, "")
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column()
    for role, names in named.items():
        if names:
            grid.add_row(Text(_role(role, lang)), str(len(names)), Text(listed(names, NAMED)))
    if grid.row_count:
        console.print(grid)
    missing = [role for role, names in named.items() if not names]
    if missing:
        say(console, phrase("survey.roles_missing", lang, roles=", ".join(_role(role, lang) for role in missing)))


def _role(name: str, lang: str) -> str:
    return str(said(labelled("role", name), lang))


def _worded(section: str, column: Column, lang: str, otherwise: str) -> str:
    """What a section of the phrases says of a column; a relation of a text's own has none there."""
    note = labelled(section, column.key)
    return str(said(note, lang)) if isinstance(note, Note) else otherwise


def _print_heads(
    console: Console, survey: Survey, columns: list[Column], key: str, against: Survey | None, lang: str
) -> None:
    pairs = [(p, other) for p, other in paired(survey, against) if against is None or other is not None]
    if key != "name":  # the largest first, what has no number last
        numbers = {p.name: _number(p, other, key) for p, other in pairs}
        pairs.sort(key=lambda pair: (math.isnan(numbers[pair[0].name]), -numbers[pair[0].name]))
    rows = [
        [both_names(p, other), _roles(p, other, lang)]
        + [_shown_number(_number(p, other, column.key), column, against is not None) for column in columns]
        for p, other in pairs
    ]
    shown: list[str] = []
    for column in columns:
        whole = _worded("column", column, lang, column.label)
        shown.append(_worded("heading", column, lang, whole))  # shorter, for 80 columns
    headings = (phrase("survey.head", lang), phrase("survey.roles", lang), *shown)
    meanings: list[str] = []
    for name, column in zip(shown, columns, strict=True):
        meaning = column.meaning if lang == "en" else _worded("meaning", column, lang, column.meaning)
        meanings.append(f"{name}: {meaning}")
    Table(headings, rows, note="\n".join(meanings)).print(console, (0, 1))


def _number(profile: HeadProfile, other: HeadProfile | None, key: str) -> float:
    """A number of a head, or the difference of two; nan for what is not there."""
    return mean_of(profile, key) - (0.0 if other is None else mean_of(other, key))


def _shown_number(number: float, column: Column, compared: bool) -> str:
    if not math.isfinite(number):
        return "-"
    rounded = round(number, column.decimals) or 0.0
    sign = "+" if (compared or column.signed) and rounded else ""
    return f"{rounded:{sign}.{column.decimals}f}"


def _roles(profile: HeadProfile, other: HeadProfile | None, lang: str) -> str:
    """The roles of a head; of two, + those that only the first has, and - those that only the second has."""
    names = {
        role: short(role) if lang == "en" else _role(role, lang) for role in (*profile.roles, *(other or profile).roles)
    }
    if other is None:
        return ", ".join(names[role] for role in profile.roles)
    gained = [f"+{names[role]}" for role in profile.roles if role not in other.roles]
    return ", ".join(gained + [f"-{names[role]}" for role in other.roles if role not in profile.roles])


BEST = 2  # heads of a relation that are shown


def relation_rows(survey: Survey) -> list[list[str]]:
    """For each relation its best heads: a cell for each heading; a head with the role has a star."""
    rows = []
    for relation in survey.relations:
        heads = [head for head in survey.profiles if relation.name in head.relations]
        for head in sorted(heads, key=lambda head: -head.relations[relation.name].lead)[:BEST]:
            score = head.relations[relation.name]
            star = "*" if relation.name in head.roles else ""
            controls = [number(value, 2) for value in (score.even, score.untrained, score.elsewhere)]
            offset = f"{relation.offset}: {number(relation.offset_accuracy, 2)}"
            low, high = score.mass.low, score.mass.high
            span = f"{number(low, 2)}-{number(high, 2)}" if abs(low) + abs(high) < 1e9 else "-"  # of one document none
            mass = [number(score.mass.mean, 2), span]
            rows.append(
                [relation.name, head.name + star, *mass, *controls, number(score.accuracy.mean, 2), offset],
            )
    return rows


def print_relations(console: Console, survey: Survey, lang: str = "en") -> None:
    """The best heads of each relation, and what the columns mean; nothing where no relation is known."""
    if not survey.relations:
        return
    headings = phrase("survey.relation_headings", lang).split(" | ")
    rows = [[_role(row[0], lang), *row[1:]] for row in relation_rows(survey)]
    told = Table(headings, rows, phrase("survey.relations", lang), phrase("survey.relation_meanings", lang))
    told.print(console, (0, 1))


def print_sentences(console: Console, survey: Survey, lang: str = "en") -> None:
    """A line for each head, its tokens in quotation marks."""
    say(console, "")
    for profile in survey.profiles:
        sentence = head_sentence(survey, profile, lang, ("“", "”"))
        say(console, f"{profile.name}: {sentence}")
