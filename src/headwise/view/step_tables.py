"""The steps of a head as sections of paragraphs and tables of text: what the terminal shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from headwise.records import HeadSteps, KeySteps
from headwise.view.page.words import check_lang, say
from headwise.view.terminal import visible

ALL_SHOWN = 16  # features; of more, some are shown and the rest is summed up
GAP = "…"  # stands for features that are not shown
NONE = "-"  # stands where a table has no number


class Row(NamedTuple):
    """One line of a table."""

    label: str
    cells: list[str]
    strong: bool = False


class Table(NamedTuple):
    """Rows of numbers that are text already. `name` is the same in every language."""

    name: str
    columns: list[str]
    rows: list[Row]


Part = str | Table | list[str]  # a paragraph, a table, the tokens of the text
Section = tuple[str, list[Part]]  # with its title


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


class Content:
    """The sections of a trace, in one language."""

    def __init__(self, steps: HeadSteps, lang: str) -> None:
        check_lang(lang)
        self.steps, self.lang, self.decimals = steps, lang, decimals_for(steps)
        self.head_dim = len(steps.query[0].values)
        self.features = shown_features(self.head_dim, steps.pairs)
        self.values = shown_features(len(steps.out))
        self.width = shown_features(len(steps.x))
        self.tokens = tuple(map(visible, steps.tokens))
        self.heading = self.say("heading", head=steps.name, token=self.tokens[steps.at])

    def say(self, phrase: str, **facts: object) -> str:
        """A phrase of the table with its facts; those that many phrases share are at hand."""
        steps = self.steps
        shared = {"at": steps.at, "model": steps.model, "layer": steps.layer, "number": steps.head}
        return say(self.lang, f"trace.{phrase}", **shared | {"kv": steps.kv_head, "decimals": self.decimals} | facts)

    def sections(self) -> list[Section]:
        parts = {
            "text": self._text(),
            "vectors": self._vectors(),
            "products": self._products(),
            "scores": self._scores(),
            "softmax": self._softmax(),
            "values": self._values(),
            "output": self._output(),
            "residual": self._residual(),
        }
        return [(self.say(name), contents) for name, contents in parts.items()]

    def number(self, value: float) -> str:
        text = f"{value:.{self.decimals}f}"
        return text.lstrip("-") if float(text) == 0 else text

    def _cells(self, values: Sequence[float], shown: list[int]) -> list[str]:
        """Numbers with a sign in each gap between those shown."""
        return [GAP if i is None else self.number(values[i]) for i in _with_gaps(shown, len(values))]

    def _rest(self, values: Sequence[float], shown: list[int]) -> list[str]:
        """The sum of what is not shown, as one cell; none where all is shown."""
        hidden = [value for i, value in enumerate(values) if i not in shown]
        return [self.number(math.fsum(hidden))] if hidden else []

    def _sum(self, values: Sequence[float], shown: list[int], terms: Sequence[float], total: float) -> list[str]:
        """What is shown of the values, the terms of the others summed up, and what all terms make."""
        return [*(self.number(values[i]) for i in shown), *self._rest(terms, shown), self.number(total)]

    def _sum_columns(self, shown: list[int], width: int, rest: str, total: str) -> list[str]:
        return [*map(str, shown), *[self.say(rest)] * (len(shown) < width), total]

    def _some(self, shown: list[int], width: int) -> list[Part]:
        return [self.say("some_features", width=width, shown=len(shown))] if len(shown) < width else []

    def _key_rows(self, name: str, cells: Callable[[KeySteps], list[str]]) -> list[Row]:
        return [Row(f"{name}{key.position} {self.tokens[key.position]}", cells(key)) for key in self.steps.keys]

    def _text(self) -> list[Part]:
        at, seen = self.steps.at, {key.position for key in self.steps.keys}
        marked = [f"{'→' * (i == at)}{i} {token}" for i, token in enumerate(self.tokens)]
        tokens = [text if i in seen else f"({text})" for i, text in enumerate(marked)]
        asked = self.say("asked", seen=len(seen), count=len(tokens))
        return [asked, tokens, self.say("legend_hidden" if len(seen) < len(tokens) else "legend")]

    def _vectors(self) -> list[Part]:
        steps = self.steps
        parts: list[Part] = [self.say("query_is") if steps.keys else self.say("nothing")]
        if steps.sharing:
            parts.append(self.say("shared", heads=", ".join(map(str, sorted((steps.head, *steps.sharing))))))
        parts += self._some(self.features, self.head_dim)
        for i, stage in enumerate(steps.query):
            if stage.kind == "normed":
                parts += [self.say("normed", width=self.head_dim, eps=steps.norm_eps), self._gains()]
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
        return Table("gains", _names(self.features, self.head_dim), rows)

    def _angles(self, stage: int, n: int) -> Table:
        """Cosine and sine of each shown pair, a line a position."""
        stages = {self.steps.at: self.steps.query[stage]} | {key.position: key.stages[stage] for key in self.steps.keys}
        rows = [
            Row(f"{j} {self.tokens[j]}", list(map(self.number, ((turned.cos or ())[:n] + (turned.sin or ())[:n]))))
            for j, turned in sorted(stages.items())
        ]
        return Table("angles", [f"{name}{m}" for name in ("cos", "sin") for m in range(n)], rows)

    def _stage(self, stage: int) -> Table:
        """The query and the shown keys as they are at one stage."""
        kind = self.steps.query[stage].kind
        vectors = [("q", self.steps.at, self.steps.query)]
        vectors += [(f"k{key.position}", key.position, key.stages) for key in self.steps.keys]
        columns, rows = _names(self.features, self.head_dim), []
        for label, position, stages in vectors:
            cells = self._cells(stages[stage].values, self.features)
            rms = stages[stage].rms
            if rms is not None:
                squares = [value * value for value in stages[stage - 1].values]
                cells += [*self._rest(squares, self.features), self.number(rms)]
            rows.append(Row(f"{label} {self.tokens[position]}", cells))
        if kind == "normed":
            columns += [self.say("rest_squares")] * (len(rows[0].cells) - len(columns) - 1) + ["r"]
        return Table(kind, columns, rows)

    def _products(self) -> list[Part]:
        rows = self._key_rows("k", lambda key: self._sum(key.products, self.features, key.products, key.dot))
        columns = self._sum_columns(self.features, self.head_dim, "rest", "q·k")
        return [self.say("products_are"), Table("products", columns, rows)]

    def _scores(self) -> list[Part]:
        steps = self.steps
        biased = any(key.bias for key in steps.keys)
        names = ["score"] + ["capped"] * (steps.softcap is not None)
        shown = [*names, "bias", "logit"] if biased else [*names[:-1], "logit"]
        words = [self.say(name) for name in shown]
        scaled = "scaled" if math.isclose(steps.scale, 1 / math.sqrt(self.head_dim)) else "scaled_by"
        parts: list[Part] = [self.say(scaled, name=words[0], width=self.head_dim, scale=self.number(steps.scale))]
        if steps.softcap is not None:
            parts.append(self.say("softcap", name=words[1], cap=f"{steps.softcap:g}"))
        if biased:
            parts.append(self.say("bias_is", before=words[-3]))
        rows = self._key_rows("k", lambda key: [self.number(getattr(key, name)) for name in ("dot", *shown)])
        return [*parts, Table("scores", ["q·k", *words], rows)]

    def _softmax(self) -> list[Part]:
        steps, names = self.steps, ("logit", "shifted", "exp", "weight")
        rows = self._key_rows("k", lambda key: [self.number(getattr(key, name)) for name in names])
        weights = math.fsum(key.weight for key in steps.keys)
        parts: list[Part] = [self.say("softmax_is", top=self.number(steps.top))]
        if steps.sink is not None and steps.sink_exp is not None and steps.sink_weight is not None:
            parts.append(self.say("sink_is", sink=self.number(steps.sink), left=self.number(weights)))
            sink = (steps.sink, steps.sink - steps.top, steps.sink_exp, steps.sink_weight)
            rows.append(Row(self.say("sink"), list(map(self.number, sink))))
            weights += steps.sink_weight
        rows.append(Row(self.say("total"), [NONE, NONE, self.number(steps.total), self.number(weights)], strong=True))
        columns = [self.say("logit"), self.say("shifted"), "exp", self.say("weight")]
        return [*parts, Table("softmax", columns, rows)]

    def _values(self) -> list[Part]:
        steps, shown = self.steps, self.values
        names = _names(shown, len(steps.out))
        values = self._key_rows("v", lambda key: self._cells(key.value, shown))
        rows = [
            Row(f"w{key.position} v{key.position} {self.tokens[key.position]}", self._cells(key.weighted, shown))
            for key in steps.keys
        ]
        rows.append(Row(self.say("sum"), self._cells(steps.summed, shown), strong=True))
        parts = [*self._some(shown, len(steps.out)), self.say("values_are"), Table("values", names, values)]
        parts += [self.say("weighted_are"), Table("weighted", names, rows)]
        if steps.gate is not None:
            gated = Row(self.say("sum"), self._cells(steps.out, shown), strong=True)
            parts += [self.say("gate_is", gate=self.number(steps.gate)), Table("gated", names, [gated])]
        return parts

    def _output(self) -> list[Part]:
        steps, shown = self.steps, self.values
        block = []
        for c in self.width:
            products = [weight * out for weight, out in zip(steps.wo[c], steps.out, strict=True)]
            block.append(Row(f"c={c}", self._sum(steps.wo[c], shown, products, steps.added[steps.head][c])))
        columns = self._sum_columns(shown, len(steps.out), "rest", self.say("added"))
        parts = [*self._some(self.width, len(steps.x)), self.say("wo_is"), Table("wo", columns, block)]
        return [*parts, self.say("added_are"), self._added()]

    def _added(self) -> Table:
        """What each head adds, the bias, and the layer's output, with the length of every line."""
        steps = self.steps
        lines = {"→" * (h == steps.head) + self.say("head", number=h): added for h, added in enumerate(steps.added)}
        if steps.out_bias is not None:
            lines["b_O"] = steps.out_bias
        lines[self.say("layer_out")] = steps.layer_out
        rows = []
        for label, values in lines.items():
            squares = [value * value for value in values]
            cells = self._sum(values, self.width, squares, math.sqrt(math.fsum(squares)))
            rows.append(Row(label, cells, strong=values is steps.layer_out))
        return Table("added", self._sum_columns(self.width, len(steps.x), "rest_squares", "|·|"), rows)

    def _residual(self) -> list[Part]:
        steps = self.steps
        lines = {"before": ("", steps.x), "layer_out": ("+ ", steps.layer_out), "new": ("", steps.x_new)}
        rows = [
            Row(sign + self.say(name), self._cells(values, self.width), strong=name == "new")
            for name, (sign, values) in lines.items()
        ]
        return [self.say("residual_is"), Table("residual", _names(self.width, len(steps.x)), rows)]


def _names(shown: list[int], width: int) -> list[str]:
    return [GAP if i is None else str(i) for i in _with_gaps(shown, width)]


def _with_gaps(shown: list[int], width: int) -> list[int | None]:
    """The shown places with None wherever some are left out."""
    result: list[int | None] = []
    for before, place in zip([-1, *shown], [*shown, width], strict=True):
        result += [None] * (place > before + 1) + [place] * (place < width)
    return result
