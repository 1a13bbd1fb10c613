"""A survey put into words, and written to the terminal.

The words are a sentence a head, columns, the signs of roles. The terminal shows which head has which role, a line for
each head, and what belongs together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table as Grid
from rich.text import Text

from headwise.heads.table import ROLES, HeadProfile, Role, Survey
from headwise.intervals import Interval
from headwise.records import HeadMaps
from headwise.table import Table, listed, number, plural
from headwise.view import Screen
from headwise.view.terminal import print_maps
from headwise.words import Note, check_lang, key_of, labelled, marked

# Statistics that a report shows at once, where there are more than FEW; the others are shown on demand.
MAIN = (
    "entropy",
    "confidence",
    "distance",
    "first",
    "previous",
    "self",
    "delimiter",
    "duplicate",
    "induction",
)
FEW = 10  # so many statistics, or fewer, are all shown at once: a round choice
KINDS = 10  # colours of roles in heads.css, .r0 to .r9


@dataclass(frozen=True)
class Column:
    """A number that each head has."""

    key: str  # a statistic, "importance" or "ablation"
    label: str
    meaning: str
    decimals: int
    signed: bool
    main: bool  # shown at once; the others on demand


def columns_of(survey: Survey) -> tuple[Column, ...]:
    """Ablation and importance where they were measured, then every statistic in the order of the survey."""
    effects = {
        "ablation": f"change in loss without the head ({survey.ablated or 'silenced'}), nats per token",
        "importance": "mean size of the loss's slope with respect to a gate on the head (Michel et al. 2019)",
    }
    main = {*effects, *MAIN, *(relation.name for relation in survey.relations)}
    if len(survey.statistics) <= FEW:
        main |= survey.statistics.keys()
    columns = []
    # meanings are in English
    for key, meaning in {**effects, **survey.statistics}.items():
        values = [value_of(profile, key) for profile in survey.profiles]
        known = [value.mean for value in values if value is not None]
        if key in effects and not known:  # it was not measured
            continue
        # Ablation has a sign: without a head the loss may rise or fall.
        shown = decimals_for(known), key == "ablation", key in main
        columns.append(Column(key, key.replace("_", " "), meaning, *shown))
    return tuple(columns)


def value_of(profile: HeadProfile, key: str) -> Interval | None:
    """A number of a head with its interval; None where it was not measured."""
    if key == "importance":
        value = profile.importance
        # It has no interval: one without ends, of 0 documents, says so.
        return None if value is None else Interval(value, -math.inf, math.inf, 0)
    return profile.ablation if key == "ablation" else profile.scores.get(key)


def decimals_for(values: Iterable[float]) -> int:
    """Decimals of a column, so that its largest number shows four digits, or three below 1; at most six."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    # 0 for 1 to 10, which get 3 decimals; -1 for 0.1 to 1, which get 3, too
    order = math.floor(math.log10(largest or 1))  # 0: all are 0, or there are none
    return max(0, 3 - order) if order >= 0 else min(6, 2 - order)


def kinds_of(roles: Sequence[Role]) -> list[int]:
    """The colour of each role, the same in every report: those of data/roles.toml come first, then relations."""
    order = list(dict.fromkeys(role.name for role in (*ROLES, *roles)))
    return [order.index(role.name) % KINDS for role in roles]


def n_layers(survey: Survey) -> int:
    """The layers of all stacks together; `part` names the stack, as the encoder of a model that has two."""
    return len({(profile.part, profile.layer) for profile in survey.profiles})


# The roles from the most telling to the least; where a head has several, the first one makes the sentence.
TELLING = (
    "induction",
    "duplicate token",
    "previous token",
    "next token",
    "delimiter",
    "rare token",
    "positional",
    "self",
    "first token",
    "copying",
)
CLOSE = 0.0005  # nats; a smaller change is written as 0.000, with three decimals


def head_sentence(
    survey: Survey,
    profile: HeadProfile,
    lang: str = "en",
    marks: tuple[str, str] = ("*", "*"),
) -> str:
    """`At *él* it looks at *write* (0.97; translation, 0.76 on average). Without it the loss rises by 0.67 nats.`

    lang   "en" or "es"; HeadwiseError for another
    marks  what stands before and behind a token
    """
    check_lang(lang)
    return " ".join(
        marked(note.key, lang, note.facts, marks)
        for note in head_notes(survey, profile)
    )


def head_notes(survey: Survey, profile: HeadProfile) -> list[Note]:
    """What is said of a head: where it looks, and what happens without it."""
    if profile.means.get("norm") == 0:  # it gives nothing, so that neither matters
        return [Note.of("sentence.silent")]
    return [_look(survey, profile), *_effect(profile.ablation)]


def _look(survey: Survey, profile: HeadProfile) -> Note:
    """The relation that it follows best; else its most telling role; else its hardest look."""
    followed = [name for name in profile.roles if name in profile.relations]
    if followed:
        role = max(followed, key=lambda name: profile.relations[name].mass.mean)
        score = profile.relations[role]
        # the token that looks, the one it looks at, with which weight
        looks, at, size = score.example
        facts = {"looks": looks, "at": at, "weight": number(size, 2)}
        facts |= {"role": labelled("role", role), "mean": number(score.mass.mean, 2)}
        return Note.of("sentence.relation", **facts)
    # a role -> the statistic by which it is earned
    scores = {role.name: role.score for role in survey.roles}
    for role in TELLING:
        if role in profile.roles:
            job = Note.of(key_of("job", role))
            mean = profile.means[scores[role]]
            return Note.of("sentence.role", job=job, role=role, mean=number(mean, 2))
    if not profile.examples:
        largest = number(profile.means.get("confidence"), 2)
        return Note.of("sentence.nothing", mean=largest)
    hardest = profile.examples[0]  # they come with the largest weight first
    # Without the space that many tokens begin with; the example of a relation comes without it.
    looks = hardest.looks.strip()
    at = hardest.at.strip()
    weight = number(hardest.weight, 2)
    return Note.of("sentence.strongest", looks=looks, at=at, weight=weight)


def _effect(change: Interval | None) -> list[Note]:
    """What silencing does; a change whose interval holds zero is not said to be one."""
    if change is None or math.isnan(change.mean):
        return []
    size = abs(change.mean)
    # Of one document the interval has no ends, and cannot tell a change from none.
    if size < CLOSE or (change.n > 1 and not change.excludes(0)):
        return [Note.of("sentence.unclear", change=number(change.mean, 3, signed=True))]
    key = "sentence.rises" if change.mean > 0 else "sentence.falls"
    # 0.67, but 0.067
    return [Note.of(key, change=number(size, 2 if size >= 0.1 else 3))]


# In the terminal.

# columns, for 80 places
SHOWN = (
    "entropy",
    "distance",
    "confidence",
    "first",
    "previous",
    "importance",
    "ablation",
)
# most heads that are named behind a role, and texts behind a model; this and LONG are round choices
NAMED = 6
LONG = 40  # characters of the name of a text, at most
# short, for 80 columns
HEADINGS = {"confidence": "conf.", "importance": "import.", "previous": "prev."}
# heads, at most, of a model whose maps and sentences are shown
SPOKEN = 16


def print_survey(screen: Screen, survey: Survey, maps: HeadMaps | None = None) -> None:
    """The roles with their heads, a table of all heads, relations; of few heads maps and sentences, too."""
    if maps is not None and len(maps.maps) <= SPOKEN:
        print_maps(screen, maps)
    _print_facts(screen, survey)
    for note in survey.notes:
        screen.say(note)
    _print_roles(screen, survey)
    _print_heads(screen, survey)
    print_relations(screen, survey)
    if len(survey) <= SPOKEN:
        screen.say("")
        for profile in survey.profiles:
            sentence = head_sentence(survey, profile, marks=("“", "”"))
            screen.say(f"{profile.name}: {sentence}")


def _print_facts(screen: Screen, survey: Survey) -> None:
    """The model, the texts that it read, and its loss."""
    # A name may be a whole text.
    names = [
        name if len(name) <= LONG else f"{name[: LONG - 3]}..." for name in survey.texts
    ]
    of = f" of {listed(names, NAMED)}" if names else ""
    if survey.loss is not None and math.isfinite(survey.loss):
        of += f", {survey.loss:.3f} nats per token"
    heads = plural(len(survey), "head")
    layers = plural(n_layers(survey), "layer")
    documents = plural(survey.n_documents, "document")
    screen.say(
        f"{survey.model}: {heads} in {layers}; {survey.n_tokens:,} tokens in {documents}{of}"
    )


def _print_roles(screen: Screen, survey: Survey) -> None:
    """A line for each role that heads have: how many, and which; then the others."""
    screen.say("")
    # two places between columns: the role, how many heads, their names
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column()
    missing = []
    for role in survey.roles:
        names = [head.name for head in survey.profiles if role.name in head.roles]
        if names:
            grid.add_row(Text(role.name), str(len(names)), Text(listed(names, NAMED)))
        else:
            missing.append(role.name)
    # rich prints an empty line for a grid without rows.
    if grid.row_count:
        screen.print(grid)
    if missing:
        screen.say(f"roles without a head: {', '.join(missing)}")


def _print_heads(screen: Screen, survey: Survey) -> None:
    """A line for each head; below them what the columns mean."""
    columns = [column for column in columns_of(survey) if column.key in SHOWN]
    columns.sort(key=lambda column: SHOWN.index(column.key))
    rows = []
    for profile in survey.profiles:
        # `previous` for `previous token`
        roles = ", ".join(role.removesuffix(" token") for role in profile.roles)
        numbers = [_shown_number(value_of(profile, x.key), x) for x in columns]
        rows.append([profile.name, roles, *numbers])
    headings = {HEADINGS.get(x.key, x.label): x.meaning for x in columns}
    note = "\n".join(f"{heading}: {meaning}" for heading, meaning in headings.items())
    # names and roles stand at the left
    Table(["head", "roles", *headings], rows, note=note).print(screen, (0, 1))


def _shown_number(value: Interval | None, column: Column) -> str:
    """A number with the decimals of its column, and its sign where the column has signs. No zero has one."""
    if value is None or not math.isfinite(value.mean):
        return "-"
    rounded = round(value.mean, column.decimals) or 0.0  # -0.0 becomes 0.0
    sign = "+" if column.signed and rounded else ""
    return f"{rounded:{sign}.{column.decimals}f}"


BEST = 2  # heads of a relation that are shown: a round choice


def print_relations(screen: Screen, survey: Survey) -> None:
    """The best heads of each relation, those whose mass lies furthest above its controls (`lead`)."""
    rows = []
    for relation in survey.relations:
        name = relation.name
        heads = [head for head in survey.profiles if name in head.relations]
        heads.sort(key=lambda head: -head.relations[name].lead)
        for head in heads[:BEST]:
            score = head.relations[name]
            star = "*" * (name in head.roles)
            mass = score.mass
            right = score.accuracy.mean
            controls = score.even, score.untrained, score.elsewhere
            shown = [number(figure, 2) for figure in (mass.mean, *controls, right)]
            # Of one document the interval has no ends.
            ends = f"{number(mass.low, 2)}-{number(mass.high, 2)}"
            shown.insert(1, ends if mass.n > 1 else "-")
            rows.append([name, head.name + star, *shown])
    headings = "relation", "head", "mass", "95 %", "even", "untr.", "else.", "right"
    note = (
        "mass: weight on the right tokens, with its 95 % interval; even: that of attention spread evenly; "
        "untr.: of the best untrained head; else.: of the same head at the same distances from other tokens; "
        "right: tokens whose largest weight is on a right one; *: has the role"
    )
    if rows:
        Table(headings, rows, "what belongs together", note).print(screen, (0, 1))
