"""The steps of a head as sections of paragraphs and tables of text: what the terminal shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from headwise.records import HeadSteps, KeySteps
from headwise.view.page.words import check_lang, say
from headwise.view.terminal import visible

ALL_SHOWN = 16  # features, and heads; of more, some are shown and the rest is summed up
MOST_KEYS = 32
GAP = "…"  # stands for features that are not shown
NONE = "-"  # stands where a table has no number


@dataclass(frozen=True)
class Row:
    """One line of a table; `token` belongs to the label."""

    label: str
    cells: list[str]
    token: str = ""
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of numbers that are text already. `name` is the same in every language."""

    name: str
    columns: list[str]
    rows: list[Row]


@dataclass(frozen=True)
class Token:
    position: int
    text: str
    asked: bool
    hidden: bool

    def __str__(self) -> str:
        marked = f"{'→' if self.asked else ''}{self.position} {self.text}"
        return f"({marked})" if self.hidden else marked


Part = str | Table | list[Token]


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    parts: list[Part]


def decimals_for(steps: HeadSteps) -> int:
    """4, or as many, up to 8, as the largest number of every group of numbers needs to show three digits."""
    stages = chain(steps.query, *(key.stages for key in steps.keys))
    groups = [*(stage.values for stage in stages), *(key.products for key in steps.keys), steps.summed, steps.out]
    groups += [tuple(chain(*(key.value for key in steps.keys))), tuple(chain(*steps.wo)), *steps.added]
    groups += [steps.layer_out, steps.x]
    tops = [top for group in groups if (top := max(map(abs, group), default=0.0)) > 0]
    return min(8, max([4, *(math.ceil(2 - math.log10(top)) for top in tops)]))


def shown_features(width: int, pairs: Sequence[tuple[int, int]] = ()) -> list[int]:
    """All of up to 16 features; of more, the first and the last four, or the first four pairs that turn together."""
    if width <= ALL_SHOWN:
        return list(range(width))
    return sorted(chain(*pairs[:4])) if pairs else [*range(4), *range(width - 4, width)]


def _largest(sizes: Sequence[float], most: int, always: int | None = None) -> list[int]:
    """The places of the `most` largest sizes, in their order; of all, where there are no more. `always` is in it."""
    order = sorted(range(len(sizes)), key=lambda i: (i != always, -sizes[i]))
    return sorted(order[:most])


class Content:
    """The sections of a trace, in one language."""

    def __init__(self, steps: HeadSteps, lang: str) -> None:
        check_lang(lang)
        self.steps, self.lang, self.decimals = steps, lang, decimals_for(steps)
        self.features = shown_features(len(steps.query[0].values), steps.pairs)
        self.values = shown_features(len(steps.out))
        self.width = shown_features(len(steps.x))
        kept = _largest([key.weight for key in steps.keys], MOST_KEYS)
        self.keys = [steps.keys[i] for i in kept]
        self.others = [key for i, key in enumerate(steps.keys) if i not in kept]
        self.tokens = tuple(map(visible, steps.tokens))
        self.heading = self.say("heading", head=steps.name, token=self.tokens[steps.at])

    def say(self, phrase: str, **facts: object) -> str:
        """A phrase of the table with its facts; those that many phrases share are at hand."""
        steps = self.steps
        shared = {"at": steps.at, "model": steps.model, "layer": steps.layer, "number": steps.head}
        return say(self.lang, f"trace.{phrase}", **shared | {"kv": steps.kv_head, "decimals": self.decimals} | facts)

    def sections(self) -> list[Section]:
        parts: dict[str, list[Part]] = {
            "text": self._text(),
            "vectors": self._vectors(),
            "products": self._products(),
            "scores": self._scores(),
            "softmax": self._softmax(),
            "values": self._values(),
            "output": self._output(),
            "residual": self._residual(),
        }
        return [Section(name, self.say(name), contents) for name, contents in parts.items()]

    def number(self, value: float) -> str:
        text = f"{value:.{self.decimals}f}"
        return text.lstrip("-") if float(text) == 0 else text

    def _cells(self, values: Sequence[float], shown: list[int]) -> list[str]:
        """Numbers with a sign in each gap between those shown."""
        return [GAP if i is None else self.number(values[i]) for i in _with_gaps(shown, len(values))]

    def _names(self, shown: list[int], width: int) -> list[str]:
        return [GAP if i is None else str(i) for i in _with_gaps(shown, width)]

    def _rest(self, values: Sequence[float], shown: list[int]) -> list[str]:
        """The sum of what is not shown, as one cell; none where all is shown."""
        hidden = [value for i, value in enumerate(values) if i not in shown]
        return [self.number(math.fsum(hidden))] if hidden else []

    def _some(self, shown: list[int], width: int) -> list[str]:
        return [self.say("some_features", width=width, shown=len(shown))] if len(shown) < width else []

    def _key_row(self, name: str, key: KeySteps, cells: list[str]) -> Row:
        return Row(f"{name}{key.position}", cells, self.tokens[key.position])

    def _text(self) -> list[Part]:
        steps = self.steps
        seen = {key.position for key in steps.keys}
        tokens = [Token(i, token, i == steps.at, i not in seen) for i, token in enumerate(self.tokens)]
        asked = self.say("asked", seen=len(seen), count=len(tokens))
        return [asked, tokens, self.say("legend_hidden" if len(seen) < len(tokens) else "legend")]

    def _vectors(self) -> list[Part]:
        steps, width = self.steps, len(self.steps.query[0].values)
        parts: list[Part] = [self.say("query_is") if steps.keys else self.say("nothing")]
        if steps.sharing:
            parts.append(self.say("shared", heads=", ".join(map(str, sorted((steps.head, *steps.sharing))))))
        parts += self._some(self.features, width)
        if self.others:
            parts.append(self.say("some_keys", count=len(steps.keys), shown=len(self.keys)))
        for i, stage in enumerate(steps.query):
            if stage.kind == "normed":
                parts += [self.say("normed", width=width, eps=steps.norm_eps), self._gains()]
            elif stage.kind == "turned":
                pairs = [pair for pair in steps.pairs if pair[0] in self.features]
                parts += [self.say("turned", pairs=", ".join(map(str, pairs))), self._angles(i, len(pairs))]
            elif len(steps.query) > 1:
                parts.append(self.say("projected"))
            parts.append(self._stage(i))
        return parts

    def _gains(self) -> Table:
        gains = {"gain_q": self.steps.q_gain or (), "gain_k": self.steps.k_gain or ()}
        rows = [Row(self.say(name), self._cells(gain, self.features)) for name, gain in gains.items()]
        return Table("gains", self._names(self.features, len(gains["gain_q"])), rows)

    def _angles(self, stage: int, n: int) -> Table:
        """Cosine and sine of each shown pair, a line a position."""
        stages = {self.steps.at: self.steps.query[stage]} | {key.position: key.stages[stage] for key in self.keys}
        rows = [
            Row(str(j), list(map(self.number, ((turned.cos or ())[:n] + (turned.sin or ())[:n]))), self.tokens[j])
            for j, turned in sorted(stages.items())
        ]
        return Table("angles", [f"{name}{m}" for name in ("cos", "sin") for m in range(n)], rows)

    def _stage(self, stage: int) -> Table:
        """The query and the shown keys as they are at one stage."""
        kind = self.steps.query[stage].kind
        vectors = [("q", self.steps.at, self.steps.query)]
        vectors += [(f"k{key.position}", key.position, key.stages) for key in self.keys]
        columns, rows = self._names(self.features, len(self.steps.query[0].values)), []
        for label, position, stages in vectors:
            cells = self._cells(stages[stage].values, self.features)
            rms = stages[stage].rms
            if rms is not None:
                squares = [value * value for value in stages[stage - 1].values]
                cells += [*self._rest(squares, self.features), self.number(rms)]
            rows.append(Row(label, cells, self.tokens[position]))
        if kind == "normed":
            columns += [self.say("rest_squares")] * (len(rows[0].cells) - len(columns) - 1) + ["r"]
        return Table(kind, columns, rows)

    def _products(self) -> list[Part]:
        rest = [self.say("rest")] * (len(self.features) < len(self.steps.query[0].values))
        rows = []
        for key in self.keys:
            cells = [self.number(key.products[i]) for i in self.features]
            cells += [*self._rest(key.products, self.features), self.number(key.dot)]
            rows.append(self._key_row("k", key, cells))
        return [self.say("products_are"), Table("products", [*map(str, self.features), *rest, "q·k"], rows)]

    def _scores(self) -> list[Part]:
        steps, width = self.steps, len(self.steps.query[0].values)
        biased = any(key.bias for key in steps.keys)
        names = ["score"] + ["capped"] * (steps.softcap is not None)
        shown = [*names, "bias", "logit"] if biased else [*names[:-1], "logit"]
        words = [self.say(name) for name in shown]
        usual = math.isclose(steps.scale, 1 / math.sqrt(width))
        sentences = [
            self.say("scaled" if usual else "scaled_by", name=words[0], width=width, scale=self.number(steps.scale))
        ]
        if steps.softcap is not None:
            sentences.append(self.say("softcap", name=words[1], cap=f"{steps.softcap:g}"))
        if biased:
            sentences.append(self.say("bias_is", before=words[-3]))
        rows = [
            self._key_row("k", key, [self.number(getattr(key, name)) for name in ("dot", *shown)]) for key in self.keys
        ]
        return [*sentences, Table("scores", ["q·k", *words], rows)]

    def _softmax(self) -> list[Part]:
        steps, names = self.steps, ("logit", "shifted", "exp", "weight")
        rows = [self._key_row("k", key, [self.number(getattr(key, name)) for name in names]) for key in self.keys]
        if self.others:
            sums = (math.fsum(key.exp for key in self.others), math.fsum(key.weight for key in self.others))
            rows.append(Row(self.say("others"), [GAP, GAP, *map(self.number, sums)]))
        weights = math.fsum(key.weight for key in steps.keys)
        sentences = [self.say("softmax_is", top=self.number(steps.top))]
        if steps.sink is not None and steps.sink_exp is not None and steps.sink_weight is not None:
            sentences.append(self.say("sink_is", sink=self.number(steps.sink), left=self.number(weights)))
            sink = (steps.sink, steps.sink - steps.top, steps.sink_exp, steps.sink_weight)
            rows.append(Row(self.say("sink"), list(map(self.number, sink))))
            weights += steps.sink_weight
        rows.append(Row(self.say("total"), [NONE, NONE, self.number(steps.total), self.number(weights)], strong=True))
        columns = [self.say("logit"), self.say("shifted"), "exp", self.say("weight")]
        return [*sentences, Table("softmax", columns, rows)]

    def _values(self) -> list[Part]:
        steps, shown = self.steps, self.values
        names = self._names(shown, len(steps.out))
        values = [self._key_row("v", key, self._cells(key.value, shown)) for key in self.keys]
        rows = [self._key_row(f"w{key.position} v", key, self._cells(key.weighted, shown)) for key in self.keys]
        if self.others:
            sums = [math.fsum(column) for column in zip(*(key.weighted for key in self.others), strict=True)]
            rows.append(Row(self.say("others"), self._cells(sums, shown)))
        rows.append(Row(self.say("sum"), self._cells(steps.summed, shown), strong=True))
        parts: list[Part] = [*self._some(shown, len(steps.out)), self.say("values_are")]
        parts += [Table("values", names, values), self.say("weighted_are"), Table("weighted", names, rows)]
        if steps.gate is not None:
            gated = Row(self.say("sum"), self._cells(steps.out, shown), strong=True)
            parts += [self.say("gate_is", gate=self.number(steps.gate)), Table("gated", names, [gated])]
        return parts

    def _output(self) -> list[Part]:
        steps = self.steps
        rest = [self.say("rest")] * (len(self.values) < len(steps.out))
        block = []
        for c in self.width:
            products = [weight * out for weight, out in zip(steps.wo[c], steps.out, strict=True)]
            cells = [self.number(steps.wo[c][e]) for e in self.values] + self._rest(products, self.values)
            block.append(Row(f"c={c}", [*cells, self.number(steps.added[steps.head][c])]))
        heads = _largest(steps.norms, ALL_SHOWN, steps.head)
        parts: list[Part] = [*self._some(self.width, len(steps.x)), self.say("wo_is")]
        parts += [Table("wo", [*map(str, self.values), *rest, self.say("added")], block), self.say("added_are")]
        if len(heads) < steps.n_heads:
            parts.append(self.say("some_heads", count=steps.n_heads, shown=len(heads)))
        return [*parts, self._heads(heads)]

    def _heads(self, heads: list[int]) -> Table:
        """What each head adds, the bias, and the layer's output, with the length of every line."""
        steps = self.steps

        def row(label: str, values: Sequence[float], strong: bool = False) -> Row:
            squares = [value * value for value in values]
            cells = [self.number(values[c]) for c in self.width] + self._rest(squares, self.width)
            return Row(label, [*cells, self.number(math.sqrt(math.fsum(squares)))], strong=strong)

        mark = {steps.head: "→"}
        rows = [row(mark.get(h, "") + self.say("head", number=h), steps.added[h]) for h in heads]
        if hidden := [steps.added[h] for h in range(steps.n_heads) if h not in heads]:
            rows.append(row(self.say("others"), [math.fsum(column) for column in zip(*hidden, strict=True)]))
        if steps.out_bias is not None:
            rows.append(row("b_O", steps.out_bias))
        rows.append(row(self.say("layer_out"), steps.layer_out, strong=True))
        rest = [self.say("rest_squares")] * (len(self.width) < len(steps.x))
        return Table("added", [*map(str, self.width), *rest, "|·|"], rows)

    def _residual(self) -> list[Part]:
        steps = self.steps
        rows = [
            Row(self.say("before"), self._cells(steps.x, self.width)),
            Row(f"+ {self.say('layer_out')}", self._cells(steps.layer_out, self.width)),
            Row(self.say("new"), self._cells(steps.x_new, self.width), strong=True),
        ]
        return [self.say("residual_is"), Table("residual", self._names(self.width, len(steps.x)), rows)]


def _with_gaps(shown: list[int], width: int) -> list[int | None]:
    """The shown places with None wherever some are left out."""
    result: list[int | None] = []
    for before, place in zip([-1, *shown], [*shown, width], strict=True):
        result += [None] * (place > before + 1) + [place] * (place < width)
    return result
