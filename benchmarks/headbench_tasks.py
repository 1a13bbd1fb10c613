"""The tasks of the bench: which heads do the work, and pairs of texts whose answers differ by it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.headbench_models import FORMS, ID, JUNK, KINDS, SIZES, Known, N, Pair, Task, Term, Work, built

LENGTH = 13
SHIFT = torch.roll(torch.eye(N), 1, 0)  # i becomes i + 1
TRANSLATED = torch.cat([torch.zeros(N, N), torch.eye(N)])  # a word, as an answer of the second language


def _kinds(weights: dict[str, float]) -> Term:
    """Which kinds of token are looked for, whoever asks."""
    matrix = torch.zeros(len(KINDS), 1)
    for kind, weight in weights.items():
        matrix[KINDS.index(kind)] = weight
    return ("one", "kind", matrix)


def _at(kind: str) -> tuple[Term, ...]:
    return (_kinds({kind: 1.0, "bos": 0.5}),)


def _like(query: str, key: str) -> tuple[Term, ...]:
    return ((query, key, None), _kinds({"bos": 0.5}))


def _says(scale: float = 1.0, matrix: Tensor | None = None) -> tuple[tuple[str, Tensor | None, float], ...]:
    return (("answer", matrix, scale),)


def _column(size: int, entries: dict[int, float], rows: int = 2 * N) -> Tensor:
    """A matrix (rows, size) that reads some kinds of token and speaks for the answers 0 (and, below 0, 1)."""
    matrix = torch.zeros(rows, size)
    for column, value in entries.items():
        matrix[0 if value > 0 else 1, column] = abs(value)
    return matrix


Item = str | tuple[str, str]


def _pair(rng: random.Random, groups: Sequence[Sequence[Item]], last: Sequence[Item], answers: tuple[int, int]) -> Pair:
    """Two texts that are laid out alike: groups in any order among fillers, then `last`."""
    groups = [list(group) for group in groups]
    free = LENGTH - 1 - len(last) - sum(map(len, groups))
    groups += [[f"filler{rng.randrange(6)}"] for _ in range(free)]
    rng.shuffle(groups)
    items = ["bos", *(item for group in groups for item in group), *last]
    clean, corrupted = ([ID[item if isinstance(item, str) else item[n]] for item in items] for n in (0, 1))
    return Pair(clean, corrupted, *(ID[f"answer{i}"] for i in answers))


def _two(rng: random.Random) -> tuple[int, int]:
    a, b = rng.sample(range(N), 2)
    return a, b


def _previous(rng: random.Random) -> Pair:
    a, b = _two(rng)
    return _pair(rng, [[f"sym{c}"] for c in rng.choices(range(N), k=2)], [(f"sym{a}", f"sym{b}"), "?"], (a, b))


def _duplicate(rng: random.Random) -> Pair:
    a, b, c = rng.sample(range(N), 3)
    return _pair(rng, [[(f"name{a}", f"name{b}")], [f"name{c}"]], [f"sym{a}"], (0, 1))


def _induction(rng: random.Random) -> Pair:
    a, b = _two(rng)
    x, y = _two(rng)
    groups = [[(f"again{a}", f"again{b}"), f"name{x}"], [(f"again{b}", f"again{a}"), f"name{y}"]]
    return _pair(rng, groups, [f"sym{a}"], (x, y))


def _cells(rng: random.Random, values: Sequence[int], keys: Sequence[int]) -> list[list[str]]:
    return [[f"cell{key}{values[key]}"] for key in keys]


def _asked(rng: random.Random) -> Pair:
    (a, b), values = _two(rng), rng.sample(range(N), N)
    return _pair(rng, _cells(rng, values, range(N)), [(f"sym{a}", f"sym{b}"), "?"], (values[a], values[b]))


def _hops(rng: random.Random) -> Pair:
    circle = rng.sample(range(N), N)
    values = [circle[(circle.index(i) + 1) % N] for i in range(N)]
    a, b = _two(rng)
    answers = values[values[a]], values[values[b]]
    return _pair(rng, _cells(rng, values, range(N)), [(f"sym{a}", f"sym{b}")], answers)


def _relay(rng: random.Random) -> Pair:
    a, b = _two(rng)
    return _pair(rng, [[(f"sym{a}", f"sym{b}"), "english"], [f"sym{rng.randrange(N)}"]], ["?"], (a, b))


def _names(rng: random.Random) -> Pair:
    a, b = _two(rng)
    return _pair(rng, [[f"name{a}"], [f"name{b}"]], [(f"again{b}", f"again{a}"), "?"], (a, b))


def _banned(rng: random.Random) -> Pair:
    a, b, c = rng.sample(range(N), 3)
    return _pair(rng, [[f"sym{a}"], [f"name{b}"]], [(f"again{b}", f"again{c}"), "?"], (a, b))


def _next(rng: random.Random) -> Pair:
    a, b = _two(rng)
    return _pair(rng, [[(f"sym{a}", f"sym{b}")]], ["?"], ((a + 1) % N, (b + 1) % N))


def _brackets(rng: random.Random) -> Pair:
    return _pair(rng, [["("], ["("], [("(", ")")], [")"]], ["?"], (0, 1))


def _sum(rng: random.Random) -> Pair:
    (a, b), (x, y) = _two(rng), _two(rng)
    while (a + x - b - y) % N == 0:
        (a, b), (x, y) = _two(rng), _two(rng)
    return _pair(rng, [[(f"sym{a}", f"sym{b}")], [(f"name{x}", f"name{y}")]], ["?"], ((a + x) % N, (b + y) % N))


def _said_twice(rng: random.Random) -> Pair:
    a, b = _two(rng)
    return _pair(rng, [[(f"sym{a}", f"sym{b}")], [(f"name{a}", f"name{b}")]], ["?"], (a, b))


def _sum_said_twice(rng: random.Random) -> Pair:
    (a, b), (x, y) = _two(rng), _two(rng)
    while (a + x - b - y) % N == 0:
        (a, b), (x, y) = _two(rng), _two(rng)
    groups = [[(f"sym{a}", f"sym{b}")], [(f"again{a}", f"again{b}")], [(f"name{x}", f"name{y}")]]
    return _pair(rng, [*groups, [(f"cell{x}0", f"cell{y}0")]], ["?"], ((a + x) % N, (b + y) % N))


def _language(rng: random.Random) -> Pair:
    a = rng.randrange(N)
    return _pair(rng, [[f"sym{a}"], [("english", "spanish")]], ["?"], (a, a + N))


def _own(rng: random.Random) -> Pair:
    """Only the last token differs, and it alone decides."""
    a, b = _two(rng)
    return _pair(rng, [[f"name{rng.randrange(N)}"], [f"sym{rng.randrange(N)}"]], [(f"sym{a}", f"sym{b}")], (a, b))


def _own_sum(rng: random.Random) -> Pair:
    (a, b), (x, y) = _two(rng), _two(rng)
    while (a + x - b - y) % N == 0:
        (a, b), (x, y) = _two(rng), _two(rng)
    return _pair(rng, [[f"name{rng.randrange(N)}"]], [(f"cell{a}{x}", f"cell{b}{y}")], ((a + x) % N, (b + y) % N))


def _one(rng: random.Random) -> Pair:
    a, b = _two(rng)
    return _pair(rng, [[(f"sym{a}", f"sym{b}")]], ["?"], (a, b))


_OPEN, _CLOSE = KINDS.index("open"), KINDS.index("close")
_FOUND = _column(len(KINDS), {KINDS.index("name"): 0.9, KINDS.index("bos"): -1.0})
_MORE, _LESS = torch.zeros(2 * N, len(KINDS)), torch.zeros(2 * N, len(KINDS))
_MORE[0, _OPEN], _LESS[0, _CLOSE] = LENGTH / 2, -LENGTH / 2
_NAMES = (_kinds({"name": 1.0, "bos": 0.5}), ("r1", "name", -torch.eye(N)))
_IF_SILENT = torch.zeros(len(KINDS), 1)
_IF_SILENT[KINDS.index("sym")] = -1.2
_ENGLISH, _SPANISH = (torch.zeros(len(KINDS), N) for _ in range(2))
_ENGLISH[KINDS.index("sym"), 0], _SPANISH[KINDS.index("sym"), 1] = 1.0, 1.0

_KEYED = ("r1", "key", None)
_REST = _kinds({"bos": 0.5})

TASKS = (
    Task("previous token", (Work("previous", 0, (), "sym", _says(), 1),), ("previous",), _previous, twin="previous"),
    Task(
        "duplicate", (Work("duplicate", 1, _like("sym", "name"), "kind", _says(1, _FOUND)),), ("duplicate",), _duplicate
    ),
    Task(
        "induction by keys",
        (
            Work("previous", 0, (), "again", (("r1", None, 1.0),), 1),
            Work("induction", 1, _like("sym", "r1"), "name", _says()),
        ),
        ("previous", "induction"),
        _induction,
        (("previous", "induction", "k"),),
        twin="induction",
    ),
    Task(
        "induction by queries",
        (
            Work("previous", 0, (), "sym", (("r1", None, 1.0),), 1),
            Work("lookup", 1, (_KEYED, _REST), "val", _says()),
        ),
        ("previous", "lookup"),
        _asked,
        (("previous", "lookup", "q"),),
        twin="previous",
    ),
    Task(
        "two lookups in turn",
        (
            Work("first", 0, _like("sym", "key"), "val", (("r1", None, 1.0),)),
            Work("second", 1, (_KEYED, _REST), "val", _says()),
        ),
        ("first", "second"),
        _hops,
        (("first", "second", "q"),),
        twin="second",
    ),
    Task(
        "relay",
        (
            Work("previous", 0, (), "sym", (("r1", None, 1.0),), 1),
            Work("mover", 1, _at("language"), "r1", _says()),
        ),
        ("previous", "mover"),
        _relay,
        (("previous", "mover", "v"),),
        twin="mover",
    ),
    Task(
        "name movers, inhibited",
        (
            Work("inhibitor", 0, _at("again"), "again", (("r1", None, 1.0),)),
            Work("mover", 1, _NAMES, "name", _says(0.8)),
            Work("second mover", 1, _NAMES, "name", _says(0.6)),
            Work("negative mover", 2, _NAMES, "name", _says(-0.4)),
        ),
        ("inhibitor", "mover", "second mover", "negative mover"),
        _names,
        tuple(("inhibitor", name, "q") for name in ("mover", "second mover", "negative mover")),
    ),
    Task(
        "suppression",
        (
            Work("copier", 0, _at("sym"), "sym", _says(1.0)),
            Work("stronger copier", 0, _at("name"), "name", _says(1.4)),
            Work("suppressor", 1, (("answer", "again", torch.eye(N, 2 * N)), _REST), "again", _says(-1.4)),
        ),
        ("suppressor",),
        _banned,
        needed=("copier", "stronger copier"),
    ),
    Task(
        "successor",
        (Work("successor", 1, _at("sym"), "sym", _says(1, SHIFT)),),
        ("successor",),
        _next,
        twin="successor",
    ),
    Task(
        "brackets",
        (Work("opened", 0, (), "kind", _says(1, _MORE)), Work("closed", 0, (), "kind", _says(1, _LESS))),
        ("opened", "closed"),
        _brackets,
    ),
    Task(
        "two lookups, both needed",
        (
            Work("symbol", 0, _at("sym"), "sym", (("r1", None, 1.0),)),
            Work("name", 0, _at("name"), "name", (("r2", None, 1.0),)),
        ),
        ("symbol", "name"),
        _sum,
        feed_forwards=("r1 + r2",),
    ),
    Task(
        "two lookups, either will do",
        (
            Work("symbol", 0, _at("sym"), "sym", (("r1", None, 1.0),)),
            Work("name", 0, _at("name"), "name", (("r1", None, 1.0),)),
        ),
        ("symbol", "name"),
        _said_twice,
        alike=(("symbol", "name"),),
        feed_forwards=("r1 > answer",),
    ),
    Task(
        "two lookups, each by either of two",
        (
            Work("symbol", 0, _at("sym"), "sym", (("r1", None, 1.0),)),
            Work("repeated", 0, _at("again"), "again", (("r1", None, 1.0),)),
            Work("name", 0, _at("name"), "name", (("r2", None, 1.0),)),
            Work("key", 0, _at("cell"), "key", (("r2", None, 1.0),)),
        ),
        ("symbol", "repeated", "name", "key"),
        _sum_said_twice,
        alike=(("symbol", "repeated"), ("name", "key")),
        feed_forwards=("r1 > s1, r2 > s2", "s1 + s2"),
    ),
    Task(
        "relation, English and Spanish",
        (
            Work("language", 0, _at("language"), "language", (("r1", torch.eye(N, 2), 1.0),)),
            Work("English mover", 1, (("r1", "kind", _ENGLISH), _REST), "sym", _says()),
            Work("Spanish mover", 1, (("r1", "kind", _SPANISH), _REST), "sym", _says(1, TRANSLATED)),
        ),
        ("language", "English mover", "Spanish mover"),
        _language,
        (("language", "English mover", "q"), ("language", "Spanish mover", "q")),
    ),
    Task(
        "a spare head",
        (
            Work("mover", 0, _at("sym"), "sym", (("answer", None, 1.0), ("done", torch.ones(1, N), 1.0))),
            Work("spare", 1, (*_at("sym"), ("done", "kind", _IF_SILENT)), "sym", _says(0.8)),
        ),
        ("mover",),
        _one,
        spare=("spare",),
        alike=(("mover", "spare"),),
    ),
)

_BYSTANDERS = (
    Work("copier", 0, _at("name"), "name", _says(0.3)),
    Work("self", 1, _like("sym", "sym"), "sym", (("junk", torch.eye(JUNK, N), 0.3),)),
)
# No head carries anything of the difference: feed-forwards do. Heads copy, and look at the last token, all the same.
HEADLESS = (
    Task("the first feed-forward", _BYSTANDERS, (), _own, feed_forwards=("sym > answer",)),
    Task("the second feed-forward", _BYSTANDERS, (), _own, feed_forwards=("", "sym > answer")),
    Task("one after the other", _BYSTANDERS, (), _own, feed_forwards=("sym > r1", "r1 > answer")),
    Task("a sum, in the first", _BYSTANDERS, (), _own_sum, feed_forwards=("key + val",)),
    Task("a sum, in the second", _BYSTANDERS, (), _own_sum, feed_forwards=("", "key + val")),
)


def numbers(tasks: Sequence[Task] = TASKS) -> list[tuple[int, int]]:
    """Every task in every form."""
    return [(t, f) for t in range(len(tasks)) for f in range(len(FORMS))]


def known(t: int, f: int, pairs: int = 2, tasks: Sequence[Task] = TASKS) -> Known:
    """One model. Noise, sharpness, twins, and idle heads that look as the circuit does come from its two numbers."""
    task, form = tasks[t], FORMS[f]
    noise, sharp = (0.0, 0.08, 0.16)[(t + f) % 3], (18.0, 26.0, 20.0)[(t + 2 * f) % 3]
    name, beside = task.name, task
    noise = noise if task.circuit else noise / 2  # where no head carries anything, none must, not even by noise
    if task.twin and f % 2:
        beside, name = with_twin(task), f"{task.name}, by twins"
    beside = with_idle(beside, random.Random(100 * t + f))
    model, where = built(beside, form, 1000 * t + f, noise, sharp)
    rng = random.Random(7000 + 100 * t + f)
    return Known(
        f"{name} ({form.name})", task.name, form.name, model, [task.pair(rng) for _ in range(pairs)],
        frozenset(where[x] for x in beside.circuit),
        frozenset((where[a], where[b], at) for a, b, at in beside.paths),
        frozenset(where[x] for x in task.needed),
        frozenset(where[x] for x in task.spare),
        tuple(frozenset(where[x] for x in group) for group in beside.alike),
    )  # fmt: skip


def with_twin(task: Task) -> Task:
    """The work is done by two heads, half by each."""
    works: list[Work] = []
    for work in task.works:
        if work.name == task.twin:
            half = tuple((register, matrix, scale / 2) for register, matrix, scale in work.writes)
            works += [replace(work, writes=half), replace(work, name="twin", writes=half)]
        else:
            works.append(work)
    both = [("twin" if a == task.twin else a, "twin" if b == task.twin else b, at) for a, b, at in task.paths]
    return replace(
        task,
        works=tuple(works),
        circuit=(*task.circuit, "twin"),
        paths=tuple(dict.fromkeys((*task.paths, *both))),
        alike=(*task.alike, (task.twin, "twin")),
    )


def with_idle(task: Task, rng: random.Random) -> Task:
    """Beside it a head that looks where the circuit looks and writes noise, and one that says the same of any text."""
    model = rng.choice([work for work in task.works if work.name in task.circuit] or task.works)
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    noise = torch.randn(JUNK, SIZES[model.reads], generator=generator)
    constant = torch.randn(2 * N, 1, generator=generator)
    layer = rng.choice([work.layer for work in task.works])
    idle = (
        replace(model, name="decoy", writes=(("junk", noise, 0.2),)),
        Work("constant", layer, _at("bos"), "one", (("answer", constant, 0.07),)),
    )
    return replace(task, works=(*task.works, *idle))
