"""A survey in the terminal: which head has which role, and a line for each head."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.errors import HeadwiseError, unknown
from headwise.heads.profiles import HeadProfile, Survey
from headwise.markup import listed, plural
from headwise.view.survey_words import (
    Column,
    both_names,
    columns_of,
    earners,
    label,
    mean_of,
    n_layers,
    notes_of,
    only_here,
    paired,
    short,
    value_of,
)
from headwise.view.tables import print_table, say

SHOWN = ("entropy", "distance", "confidence", "first", "previous", "importance", "ablation")
HEADINGS = {"confidence": "conf.", "importance": "import.", "previous": "prev."}  # for 80 columns
NAMED = 6  # heads that are named behind a role
LONG = 40  # characters of the name of a text, at most
EFFECTS = ("importance", "ablation")


def print_survey(console: Console, survey: Survey, sort_by: str = "name", against: Survey | None = None) -> None:
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
    columns = _shown(columns_of(survey, against), key)
    say(console, _facts(survey))
    if against is not None:
        say(console, _facts(against))
    for note in notes_of(survey, against):
        say(console, note)
    _print_roles(console, survey)
    if against is not None:
        say(console, f"\n{survey.model} minus {against.model}; a role with + is only in the first, with - the second")
    _print_heads(console, survey, columns, key, against)
    for model, names in only_here(survey, against):
        say(console, f"only in {model}: {names}")


def check_order(statistics: Iterable[str], sort_by: str) -> str:
    """The key that `sort_by` names: a statistic, an effect or "name", also by its label or by its heading in the table.

    Raises HeadwiseError for any other.
    """
    known = ("name", *EFFECTS, *statistics)
    keys = {name: key for key in known for name in (label(key), HEADINGS.get(key, key))} | {key: key for key in known}
    if sort_by not in keys:
        raise unknown(f"cannot sort by {sort_by!r}", sort_by, keys)
    return keys[sort_by]


def _facts(survey: Survey) -> str:
    heads = f"{plural(len(survey), 'head')} in {plural(n_layers(survey), 'layer')}"
    tokens = f"{plural(survey.n_tokens, 'token')} in {plural(survey.n_documents, 'document')}"
    loss = f", {survey.loss:.3f} nats per token" if survey.loss is not None and math.isfinite(survey.loss) else ""
    names = [name if len(name) <= LONG else f"{name[: LONG - 3]}..." for name in survey.texts]  # it may be a whole text
    text = f" of {listed(names, NAMED)}" if names else ""
    return f"{survey.model}: {heads}; {tokens}{text}{loss}"


def _print_roles(console: Console, survey: Survey) -> None:
    """A line for each role that heads have: how many, and which; then the others."""
    named = earners(survey)
    say(console, "")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column()
    for role, names in named.items():
        if names:
            grid.add_row(Text(role), str(len(names)), Text(listed(names, NAMED)))
    if grid.row_count:
        console.print(grid)
    missing = [role for role, names in named.items() if not names]
    if missing:
        say(console, f"roles without a head: {', '.join(missing)}")


def _shown(columns: tuple[Column, ...], key: str) -> list[Column]:
    """The columns of the table, and that by which it is sorted."""
    known = {column.key: column for column in columns}
    wanted = [name for name in SHOWN if name in known]
    if key in known and key not in wanted:
        wanted.insert(0, key)
    return [known[name] for name in wanted]


def _print_heads(console: Console, survey: Survey, columns: list[Column], key: str, against: Survey | None) -> None:
    pairs = [(p, other) for p, other in paired(survey, against) if against is None or other is not None]
    if key != "name":
        pairs.sort(key=lambda pair: _order(_number(pair[0], pair[1], key)))
    rows = [
        [both_names(p, other), _roles(p, other)]
        + [_shown_number(_number(p, other, column.key), column, against is not None) for column in columns]
        for p, other in pairs
    ]
    headings = ("head", "roles", *(HEADINGS.get(column.key, column.label) for column in columns))
    print_table(console, "", headings, rows, words=(0, 1))
    say(console, "\n".join(f"{name}: {column.meaning}" for name, column in zip(headings[2:], columns, strict=True)))


def _number(profile: HeadProfile, other: HeadProfile | None, key: str) -> float:
    """A number of a head, or the difference of two; nan for what is not there."""
    return mean_of(profile, key) - (0.0 if other is None else mean_of(other, key))


def _order(number: float) -> tuple[bool, float]:
    return (math.isnan(number), -number)


def _shown_number(number: float, column: Column, compared: bool) -> str:
    if not math.isfinite(number):
        return "-"
    rounded = round(number, column.decimals) or 0.0
    sign = "+" if (compared or column.signed) and rounded else ""
    return f"{rounded:{sign}.{column.decimals}f}"


def _roles(profile: HeadProfile, other: HeadProfile | None) -> str:
    if other is None:
        return ", ".join(map(short, profile.roles))
    gained = [f"+{short(role)}" for role in profile.roles if role not in other.roles]
    return ", ".join(gained + [f"-{short(role)}" for role in other.roles if role not in profile.roles])
