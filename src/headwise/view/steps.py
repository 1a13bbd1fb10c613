"""One head at one position, number by number: in the terminal, and as one HTML file.

Both are drawn from the same sections, made of paragraphs and tables whose cells are text already, so that they show
the same digits. A reader who recomputes a line from the shown numbers above it gets the shown result, within what
rounding to the stated number of decimals explains.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
import string
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import chain
from pathlib import Path

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from headwise.errors import HeadwiseError
from headwise.files import write_whole
from headwise.records import HeadSteps, KeySteps
from headwise.view.terminal import visible

ALL_SHOWN = 16  # features, and heads; of more, some are shown and the rest is summed up
MOST_KEYS = 32
WIDEST = 100  # columns in the terminal
LABEL_WIDTH = 18
GAP = "…"  # stands for features that are not shown
NONE = "-"  # stands where a table has no number

WORDS: dict[str, dict[str, str]] = {
    "en": {
        "kicker": "One head, one position, step by step",
        "heading": "{head} at position {at}: {token}",
        "lede": "{model}. Layer {layer}, head {number}. Layers, heads, positions and features are counted from 0.",
        "rounding": "Every number here is rounded to {decimals} decimals: it stands for half a unit of the last "
        "decimal more or less. So a sum of n shown numbers may differ from the shown sum by (n + 1)/2 units of the "
        "last decimal, and the product of a and b by about (|a| + |b| + 1)/2. Given are q, k, v, W_O, x and what the "
        "other heads add; within that margin, every other line follows from those above it. Behind the rounding all "
        "is computed in double precision; --json gives it unrounded.",
        "text": "The text",
        "asked": "The question: what does this head do at position {at}? It may look at {seen} of {count} positions.",
        "legend": "→ the position asked about",
        "legend_hidden": "→ the position asked about; in parentheses, what it may not look at",
        "vectors": "The query and the keys",
        "query_is": "q is this head's slice of W_Q x at position {at}, where x is what the layer reads; k_j is the "
        "slice of W_K x of key/value head {kv} at each position j it may look at.",
        "shared": "Key/value head {kv} is read by the query heads {heads}.",
        "projected": "As projected:",
        "normed": "qk-norm: each vector divided by its r = √(sum of squares / {width} + {eps}), then multiplied by "
        "the gain, feature by feature:",
        "turned": "RoPE: features {pairs} turn together, (a, b) → (a cos - b sin, b cos + a sin), by an angle that "
        "grows with the position:",
        "some_features": "Of {width} features {shown} are shown; where a line needs the others, they stand as rest.",
        "some_keys": "Of {count} keys the {shown} with the largest weights are shown; the others stand as one line.",
        "some_heads": "Of {count} heads {shown} are shown; the others stand as one line.",
        "products": "Query times key",
        "products_are": "q_d k_jd, feature by feature; the sum of a line is the dot product q·k_j.",
        "scores": "Scale",
        "scaled": "{name} = q·k / √{width}",
        "scaled_by": "{name} = q·k · {scale}",
        "softcap": "{name} = {cap} tanh(score / {cap})",
        "bias_is": "logit = {before} + bias, which the mask adds by position",
        "softmax": "Softmax",
        "softmax_is": "The largest logit is {top}. shifted = logit - {top}; exp = e^shifted; weight = exp / total. "
        "The weights add up to 1.",
        "sink_is": "The sink is a learned logit, {sink}. It takes its share of the softmax and gives no value, so "
        "that the keys share {left}.",
        "values": "Weighted values",
        "values_are": "v_j is the slice of W_V x of key/value head {kv}:",
        "weighted_are": "Each value times its weight; their sum is the head's output:",
        "gate_is": "The head's output is then multiplied by its gate, {gate}.",
        "output": "Through W_O",
        "wo_is": "W_O has a block of columns for each head. Line c of this head's block, times the head's output, "
        "feature by feature and summed, is what the head adds to feature c:",
        "added_are": "So does every head, each with its own output and block. The sum of all lines is the layer's "
        "output. |·| is the length of a line: the root of its sum of squares.",
        "residual": "The residual stream",
        "residual_is": "What the layer was given, plus what its heads add:",
        "nothing": "The mask lets this position look at nothing, so that the head's output is 0.",
        "rest": "rest",
        "rest_squares": "rest²",
        "score": "score",
        "capped": "capped",
        "bias": "bias",
        "logit": "logit",
        "shifted": "shifted",
        "weight": "weight",
        "sum": "sum",
        "total": "total",
        "sink": "sink",
        "others": "others",
        "gain_q": "gain q",
        "gain_k": "gain k",
        "added": "added",
        "head": "head {number}",
        "layer_out": "layer",
        "before": "x",
        "new": "new x",
        "contents": "Steps",
        "made_by": "Made by headwise. This file is complete: it loads nothing and sends nothing.",
    },
    "es": {
        "kicker": "Una cabeza, una posición, paso a paso",
        "heading": "{head} en la posición {at}: {token}",
        "lede": "{model}. Capa {layer}, cabeza {number}. Capas, cabezas, posiciones y componentes se cuentan desde 0.",
        "rounding": "Cada número está redondeado a {decimals} decimales: representa media unidad del último decimal "
        "de más o de menos. Por eso la suma de n números mostrados puede diferir de la suma mostrada en (n + 1)/2 "
        "unidades del último decimal, y el producto de a y b en unas (|a| + |b| + 1)/2. Están dados q, k, v, W_O, x y "
        "lo que añaden las demás cabezas; dentro de ese margen, toda otra línea se obtiene de las anteriores. Detrás "
        "del redondeo todo se calcula en doble precisión; --json lo da sin redondear.",
        "text": "El texto",
        "asked": "La pregunta: ¿qué hace esta cabeza en la posición {at}? Puede mirar {seen} de {count} posiciones.",
        "legend": "→ la posición por la que se pregunta",
        "legend_hidden": "→ la posición por la que se pregunta; entre paréntesis, lo que no puede mirar",
        "vectors": "La consulta y las claves",
        "query_is": "q es la parte de esta cabeza en W_Q x en la posición {at}, donde x es lo que lee la capa; k_j es "
        "la parte de la cabeza de clave y valor {kv} en W_K x, en cada posición j que puede mirar.",
        "shared": "La cabeza de clave y valor {kv} la leen las cabezas de consulta {heads}.",
        "projected": "Tal como se proyectan:",
        "normed": "qk-norm: cada vector se divide por su r = √(suma de cuadrados / {width} + {eps}) y luego se "
        "multiplica por la ganancia, componente a componente:",
        "turned": "RoPE: las componentes {pairs} giran juntas, (a, b) → (a cos - b sin, b cos + a sin), con un ángulo "
        "que crece con la posición:",
        "some_features": "De {width} componentes se muestran {shown}; donde una línea necesita las demás, figuran como "
        "resto.",
        "some_keys": "De {count} claves se muestran las {shown} de mayor peso; las demás figuran en una sola línea.",
        "some_heads": "De {count} cabezas se muestran {shown}; las demás figuran en una sola línea.",
        "products": "Consulta por clave",
        "products_are": "q_d k_jd, componente a componente; la suma de una línea es el producto escalar q·k_j.",
        "scores": "Escala",
        "scaled": "{name} = q·k / √{width}",
        "scaled_by": "{name} = q·k · {scale}",
        "softcap": "{name} = {cap} tanh(puntuación / {cap})",
        "bias_is": "logit = {before} + sesgo, que la máscara suma según la posición",
        "softmax": "Softmax",
        "softmax_is": "El mayor logit es {top}. desplazado = logit - {top}; exp = e^desplazado; peso = exp / total. "
        "Los pesos suman 1.",
        "sink_is": "El sumidero es un logit aprendido, {sink}. Toma su parte del softmax y no aporta valor, de modo "
        "que las claves se reparten {left}.",
        "values": "Valores ponderados",
        "values_are": "v_j es la parte de la cabeza de clave y valor {kv} en W_V x:",
        "weighted_are": "Cada valor por su peso; la suma es la salida de la cabeza:",
        "gate_is": "La salida de la cabeza se multiplica después por su compuerta, {gate}.",
        "output": "A través de W_O",
        "wo_is": "W_O tiene un bloque de columnas para cada cabeza. La línea c del bloque de esta cabeza, multiplicada "
        "componente a componente por la salida de la cabeza y sumada, es lo que la cabeza añade a la componente c:",
        "added_are": "Lo mismo hace cada cabeza, con su propia salida y su bloque. La suma de todas las líneas es la "
        "salida de la capa. |·| es la longitud de una línea: la raíz de su suma de cuadrados.",
        "residual": "La corriente residual",
        "residual_is": "Lo que recibió la capa, más lo que añaden sus cabezas:",
        "nothing": "La máscara no deja mirar nada a esta posición, así que la salida de la cabeza es 0.",
        "rest": "resto",
        "rest_squares": "resto²",
        "score": "puntuación",
        "capped": "acotada",
        "bias": "sesgo",
        "logit": "logit",
        "shifted": "desplazado",
        "weight": "peso",
        "sum": "suma",
        "total": "total",
        "sink": "sumidero",
        "others": "las demás",
        "gain_q": "ganancia q",
        "gain_k": "ganancia k",
        "added": "añade",
        "head": "cabeza {number}",
        "layer_out": "capa",
        "before": "x",
        "new": "nueva x",
        "contents": "Pasos",
        "made_by": "Hecho con headwise. Este archivo está completo: no carga ni envía nada.",
    },
}


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
    bars: bool = False  # the page draws the last column as bars, too


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


def print_steps(console: Console, steps: HeadSteps, lang: str = "en") -> None:
    """Print every step, at most 100 columns wide; a wider table goes on in further bands below.

    Raises HeadwiseError for a language that is not en or es.
    """
    if console.options.ascii_only:
        plain = tuple(visible(token).encode("ascii", "backslashreplace").decode() for token in steps.tokens)
        steps = replace(steps, tokens=plain)
    content = _Content(steps, lang)
    _say(console, content.heading, "bold")
    _say(console, content.say("lede"))
    _say(console, content.say("rounding"), "dim")
    for number, section in enumerate(content.sections(), 1):
        _say(console, "")
        _say(console, f"{number}. {section.title}", "bold")
        for part in section.parts:
            if isinstance(part, Table):
                _print_table(console, part)
            elif isinstance(part, str):
                _say(console, part)
            else:
                _print_tokens(console, part)


def _width(console: Console) -> int:
    return min(console.width, WIDEST)


def _say(console: Console, text: str, style: str = "") -> None:
    """A paragraph, wrapped here: the console may be one that does not wrap."""
    for line in Text(text).wrap(console, _width(console)) or [Text()]:
        _line(console, line.plain.rstrip(), style)


def _line(console: Console, text: str, style: str = "") -> None:
    text = _ascii(text) if console.options.ascii_only else text
    console.print(Text(text, style), highlight=False, markup=False, soft_wrap=True)


def _ascii(text: str) -> str:
    """This module's own signs and accents in ASCII; tokens are escaped before."""
    for sign, plain in {"√": "sqrt ", "·": ".", "→": ">", "…": "~", "²": "2"}.items():
        text = text.replace(sign, plain)
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def _print_tokens(console: Console, tokens: list[Token]) -> None:
    line = ""
    for token in map(str, tokens):
        if line and cell_len(line) + cell_len(token) + 3 > _width(console):
            _line(console, line)
            line = ""
        line += ("   " if line else "") + token
    _line(console, line)


def _print_table(console: Console, table: Table) -> None:
    """Columns side by side as far as they fit, the others in further bands, each with the labels at its left."""
    labels = [f"{row.label} {row.token}".rstrip() for row in table.rows]
    side = min(LABEL_WIDTH, max(map(cell_len, labels), default=0))
    labels = [label if cell_len(label) <= side else set_cell_size(label, side - 1) + GAP for label in labels]
    columns = list(zip(table.columns, *(row.cells for row in table.rows), strict=True))
    widths = [max(map(cell_len, column)) + 2 for column in columns]
    start = 0
    while start < len(columns):
        end = start + 1
        while end < len(columns) and side + 2 + sum(widths[start : end + 1]) <= _width(console):
            end += 1
        for at, label in enumerate(["", *labels]):
            cells = (" " * (w - cell_len(column[at])) + column[at] for column, w in zip(columns, widths, strict=True))
            strong = at > 0 and table.rows[at - 1].strong
            style = "bold" if strong else "" if at else "dim"
            _line(console, "  " + set_cell_size(label, side) + "".join(list(cells)[start:end]), style)
        start = end


def write_steps(path: str | Path, steps: HeadSteps, lang: str = "en") -> None:
    """Write the page of `steps_html`, whole or not at all."""
    write_whole(path, steps_html(steps, lang))


def steps_html(steps: HeadSteps, lang: str = "en") -> str:
    """Every step as one HTML page that loads nothing, runs no script and can be opened from a disk.

    Raises HeadwiseError for a language that is not en or es.
    """
    content = _Content(steps, lang)
    package = resources.files("headwise.view")
    style, page = (package.joinpath(f"steps.{kind}").read_text(encoding="utf-8") for kind in ("css", "html"))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    sections = content.sections()
    links = (f'<li><a href="#{section.name}">{_prose(section.title)}</a></li>' for section in sections)
    return string.Template(page).substitute(
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'",
        lang=lang,
        title=_text(content.heading),
        heading=_text(content.heading),
        style=style,
        sections="".join(map(_section_html, sections)),
        links="".join(links),
        rounding=_prose(content.say("rounding")),
        **{name: _text(content.say(name)) for name in ("kicker", "lede", "contents", "made_by")},
    )


def _text(text: str) -> str:
    """Escaped; half a surrogate pair, which UTF-8 cannot hold, becomes `?`."""
    return html.escape(text.encode("utf-8", "replace").decode())


def _prose(text: str) -> str:
    """This module's own words, escaped, with k_j as an index; tokens and names never come here."""
    return re.sub(r"\b([A-Za-z])_([A-Za-z]+)", r"\1<sub>\2</sub>", _text(text))


def _section_html(section: Section) -> str:
    parts = []
    for part in section.parts:
        if isinstance(part, Table):
            parts.append(_table_html(part, section.title))
        elif isinstance(part, str):
            parts.append(f"<p>{_prose(part)}</p>")
        else:
            parts.append(f'<p class="tokens">{"".join(map(_token_html, part))}</p>')
    title = f'<h2 id="{section.name}-title">{_prose(section.title)}</h2>'
    return f'<section id="{section.name}" aria-labelledby="{section.name}-title">{title}{"".join(parts)}</section>'


def _token_html(token: Token) -> str:
    kind = "asked" if token.asked else "hidden-token" if token.hidden else ""
    before, after = str(replace(token, text="\n")).split("\n")
    return f'<span class="{kind}">{_text(before)}<bdi>{_text(token.text)}</bdi>{_text(after)}</span> '


def _table_html(table: Table, title: str) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in table.columns)
    features = [name.isdigit() for name in table.columns]  # shaded by size; sums and lengths would drown them
    shaded = (cell for row in table.rows for cell, one in zip(row.cells, features, strict=True) if one)
    largest = max((abs(float(cell)) for cell in shaded), default=0.0)
    longest = max((float(row.cells[-1]) for row in table.rows), default=0.0) if table.bars else 0.0
    body = "".join(_row_html(row, features, largest, longest) for row in table.rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(title)}"><table data-name="{table.name}">'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row_html(row: Row, features: list[bool], largest: float, longest: float) -> str:
    """One line; with `longest`, the last cell is drawn as a bar, too, but that of a sum."""
    token = f" <bdi>{_text(row.token)}</bdi>" if row.token else ""
    shades = (_shade(float(cell), largest) if one else "" for cell, one in zip(row.cells, features, strict=True))
    cells = "".join(f"<td{shade}>{cell}</td>" for cell, shade in zip(row.cells, shades, strict=True))
    if longest and not row.strong:
        width = 100 * float(row.cells[-1]) / longest
        cells += f'<td class="bar"><svg aria-hidden="true"><rect width="{width:.1f}%" height="100%"/></svg></td>'
    kind = ' class="strong"' if row.strong else ""
    return f'<tr{kind}><th scope="row">{_text(row.label)}{token}</th>{cells}</tr>'


def _shade(number: float, largest: float) -> str:
    """A class for how large a number is within its table: p1 to p3, n1 to n3 for negative ones, or none."""
    level = sum(abs(number) >= step * largest > 0 for step in (0.15, 0.4, 0.7))
    return f' class="{"n" if number < 0 else "p"}{level}"' if level else ""


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


class _Content:
    """The sections of a trace, in one language."""

    def __init__(self, steps: HeadSteps, lang: str) -> None:
        if lang not in WORDS:
            raise HeadwiseError(f"lang={lang!r} is not known; one of {', '.join(WORDS)}")
        self.steps, self.words, self.decimals = steps, WORDS[lang], decimals_for(steps)
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
        return self.words[phrase].format(**shared | {"kv": steps.kv_head, "decimals": self.decimals} | facts)

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
        return [Section(name, self.say(name), some) for name, some in parts.items()]

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
        found = {self.steps.at: self.steps.query[stage]} | {key.position: key.stages[stage] for key in self.keys}
        rows = [
            Row(str(j), list(map(self.number, ((one.cos or ())[:n] + (one.sin or ())[:n]))), self.tokens[j])
            for j, one in sorted(found.items())
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
        said = [
            self.say("scaled" if usual else "scaled_by", name=words[0], width=width, scale=self.number(steps.scale))
        ]
        if steps.softcap is not None:
            said.append(self.say("softcap", name=words[1], cap=f"{steps.softcap:g}"))
        if biased:
            said.append(self.say("bias_is", before=words[-3]))
        rows = [
            self._key_row("k", key, [self.number(getattr(key, name)) for name in ("dot", *shown)]) for key in self.keys
        ]
        return [*said, Table("scores", ["q·k", *words], rows)]

    def _softmax(self) -> list[Part]:
        steps, names = self.steps, ("logit", "shifted", "exp", "weight")
        rows = [self._key_row("k", key, [self.number(getattr(key, name)) for name in names]) for key in self.keys]
        if self.others:
            sums = (math.fsum(key.exp for key in self.others), math.fsum(key.weight for key in self.others))
            rows.append(Row(self.say("others"), [GAP, GAP, *map(self.number, sums)]))
        weights = math.fsum(key.weight for key in steps.keys)
        said = [self.say("softmax_is", top=self.number(steps.top))]
        if steps.sink is not None and steps.sink_exp is not None and steps.sink_weight is not None:
            said.append(self.say("sink_is", sink=self.number(steps.sink), left=self.number(weights)))
            sink = (steps.sink, steps.sink - steps.top, steps.sink_exp, steps.sink_weight)
            rows.append(Row(self.say("sink"), list(map(self.number, sink))))
            weights += steps.sink_weight
        rows.append(Row(self.say("total"), [NONE, NONE, self.number(steps.total), self.number(weights)], strong=True))
        columns = [self.say("logit"), self.say("shifted"), "exp", self.say("weight")]
        return [*said, Table("softmax", columns, rows, bars=True)]

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
        return Table("added", [*map(str, self.width), *rest, "|·|"], rows, bars=True)

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
