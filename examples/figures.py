"""Draw the structure of attention: writes docs/figures/*.svg and, for the exercises, the same into the package.

    python examples/figures.py

Each figure is drawn once and labelled in English and in Spanish. Its text is text: a reader can select it, a screen
reader can read it, and title and description say what is drawn. Colours follow the reader's light or dark mode.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = (ROOT / "docs" / "figures", ROOT / "src" / "headwise" / "teach" / "figures")
LANGUAGES = ("en", "es")

STYLE = """
svg { color-scheme: light dark; }
.paper { fill: #fbfaf6; }
text { font: 14px system-ui, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; fill: #1c1a26; }
.small { font-size: 12px; fill: #5f5b69; }
.mono { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 13px; }
.head { font-weight: 600; }
.box { fill: #ffffff; stroke: #8f8a80; }
.off { fill: #f0ece2; stroke: #cfcabd; }
.c0 { fill: #cfe0ef; stroke: #2f5590; }
.c1 { fill: #f6ddba; stroke: #96621a; }
.c2 { fill: #d9ead2; stroke: #3d7030; }
.line { stroke: #5f5b69; stroke-width: 1.5; fill: none; }
.tip { fill: #5f5b69; }
@media (prefers-color-scheme: dark) {
  .paper { fill: #14141a; }
  text { fill: #e9e6dd; }
  .small { fill: #aaa69c; }
  .box { fill: #22222b; stroke: #6f6b78; }
  .off { fill: #1b1b22; stroke: #3a3842; }
  .c0 { fill: #1f3a5c; stroke: #7da6c4; }
  .c1 { fill: #4d3612; stroke: #dca75b; }
  .c2 { fill: #24421c; stroke: #8fc27f; }
  .line { stroke: #aaa69c; }
  .tip { fill: #aaa69c; }
}
"""


class Drawing:
    """A figure as it grows; `say` chooses the words of the language."""

    def __init__(self, language: str, width: int, height: int) -> None:
        self.language, self.width, self.height = language, width, height
        self.parts: list[str] = []

    def say(self, english: str, spanish: str) -> str:
        return english if self.language == "en" else spanish

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>')

    def box(self, x: float, y: float, w: float, h: float, words: str = "", kind: str = "box", text: str = "") -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4" class="{kind}"/>')
        if words:
            self.text(x + w / 2, y + h / 2 + 5, words, text)

    def arrow(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """A line that ends in a tip, drawn as a small triangle along it."""
        length = max(1e-9, ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5)
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        bx, by = x1 - 8 * ux, y1 - 8 * uy
        points = f"{x1:.1f},{y1:.1f} {bx - 4 * uy:.1f},{by + 4 * ux:.1f} {bx + 4 * uy:.1f},{by - 4 * ux:.1f}"
        self.parts.append(f'<path class="line" d="M{x0:g} {y0:g}L{bx:.1f} {by:.1f}"/>')
        self.parts.append(f'<polygon class="tip" points="{points}"/>')

    def grid(self, x: float, y: float, size: float, cells: list[list[str]]) -> None:
        """Small squares, one for each name of a class."""
        for row, kinds in enumerate(cells):
            for column, kind in enumerate(kinds):
                self.box(x + column * size, y + row * size, size - 2, size - 2, kind=kind)

    def svg(self, title: str, about: str) -> str:
        w, h = self.width, self.height
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" '
            f'lang="{self.language}" aria-labelledby="title about">\n'
            f'<title id="title">{escape(title)}</title>\n<desc id="about">{escape(about)}</desc>\n'
            f'<style>{STYLE}</style>\n<rect class="paper" width="{w}" height="{h}" rx="8"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def head(language: str) -> str:
    d = Drawing(language, 720, 250)
    words = ("he", "works", "=", "él")
    for i, word in enumerate(words):
        d.box(24, 24 + 52 * i, 74, 36, word, "c1" if word == "él" else "box", "mono")
        d.arrow(100, 42 + 52 * i, 138, 42 + 52 * i)
    d.box(140, 180, 150, 36, d.say("query of él", "consulta de él"), "c1")
    for i in range(4):
        if i < 3:
            d.box(140, 24 + 52 * i, 70, 36, d.say("key", "clave"), "c0")
            d.box(220, 24 + 52 * i, 70, 36, d.say("value", "valor"), "c2")
    for i, (score, weight) in enumerate((("0.2", "0.13"), ("2.0", "0.77"), ("0.0", "0.10"))):
        y = 42 + 52 * i
        d.arrow(292, y, 338, y)
        d.text(364, y + 5, score, "mono")
        d.arrow(390, y, 436, y)
        d.box(440, y - 12, 110 * float(weight), 24, kind="c0")
        d.text(450 + 110 * float(weight), y + 5, weight, "mono", "start")
        d.arrow(600, y, 630, 94 + 12 * (i - 1))
    d.box(632, 74, 66, 40, d.say("result", "salida"), "c2")
    for x, label in (
        (348, d.say("1. scores", "1. puntuaciones")),
        (500, d.say("2. softmax: weights", "2. softmax: pesos")),
        (650, d.say("3. mixed values", "3. mezcla")),
    ):
        d.text(x, 205, label, "head")
    d.text(348, 225, d.say("query · key", "consulta · clave"), "small")
    d.text(500, 225, d.say("add up to 1", "suman 1"), "small")
    d.text(650, 225, d.say("weight \u00d7 value", "peso \u00d7 valor"), "small")
    return d.svg(
        d.say("One head of attention", "Una cabeza de atención"),
        d.say(
            "The query of the token él is compared with the keys of he, works and =. The scores 0.2, 2.0 and "
            "0.0 become the weights 0.13, 0.77 and 0.10 by softmax, and the values are mixed in proportion.",
            "La consulta del token él se compara con las claves de he, works y =. Las puntuaciones 0.2, 2.0 y "
            "0.0 se convierten con softmax en los pesos 0.13, 0.77 y 0.10, y los valores se mezclan en esa "
            "proporción.",
        ),
    )


def mask(language: str) -> str:
    d = Drawing(language, 720, 270)
    words = ("he", "works", "=", "él", "trabaja")
    for place, title, allowed in (
        (0, d.say("causal: token i sees 0 to i", "causal: el token i ve de 0 a i"), lambda i, j: j <= i),
        (1, d.say("padding: nobody sees PAD", "relleno: nadie ve PAD"), lambda i, j: j < 3),
    ):
        x, y, names = 90 + 350 * place, 76, words if place == 0 else (*words[:3], "PAD", "PAD")
        d.text(x + 85, 28, title, "head")
        d.grid(x, y, 34, [["c0" if allowed(i, j) else "off" for j in range(5)] for i in range(5)])
        for i, word in enumerate(names):
            d.text(x - 8, y + 22 + 34 * i, word, "mono", "end")
            d.text(x + 16 + 34 * i, y - 10, word if len(word) < 6 else word[:4] + ".", "small")
            for j in range(5):
                d.text(
                    x + 16 + 34 * j,
                    y + 21 + 34 * i,
                    "1" if allowed(i, j) else "0",
                    "mono" if allowed(i, j) else "small",
                )
    d.text(
        360,
        262,
        d.say("row: who looks · column: who is looked at", "fila: quién mira · columna: a quién se mira"),
        "small",
    )
    return d.svg(
        d.say("Two masks", "Dos máscaras"),
        d.say(
            "Left, the causal mask of five tokens: a triangle, row i has ones up to column i. Right, the "
            "padding mask of a text of three tokens filled up to five: the last two columns are forbidden to "
            "all rows.",
            "A la izquierda, la máscara causal de cinco tokens: un triángulo, la fila i tiene unos hasta la "
            "columna i. A la derecha, la máscara de relleno de un texto de tres tokens completado a cinco: "
            "las dos últimas columnas están prohibidas para todas las filas.",
        ),
    )


def heads(language: str) -> str:
    d = Drawing(language, 720, 260)
    d.box(20, 104, 84, 44, d.say("tokens x", "tokens x"))
    asks = (
        d.say("which person?", "¿qué persona?"),
        d.say("which verb?", "¿qué verbo?"),
        d.say("which tense?", "¿qué tiempo?"),
    )
    for i, ask in enumerate(asks):
        y = 24 + 74 * i
        d.arrow(104, 126, 148, y + 28)
        d.box(150, y, 110, 56, kind=f"c{i}")
        d.text(205, y + 24, "W_Q W_K W_V", "mono")
        d.text(205, y + 43, d.say(f"of head {i}", f"de la cabeza {i}"), "small")
        d.arrow(260, y + 28, 296, y + 28)
        d.box(298, y, 120, 56, kind=f"c{i}")
        d.text(358, y + 24, d.say(f"head {i}", f"cabeza {i}"), "head")
        d.text(358, y + 43, ask, "small")
        d.arrow(418, y + 28, 474, 106 + 20 * i)
        d.box(476, 92 + 23 * i, 60, 21, kind=f"c{i}")
    d.text(506, 80, d.say("joined", "unidas"), "head")
    d.arrow(538, 126, 574, 126)
    d.box(576, 104, 56, 44, "W_O", "box", "mono")
    d.arrow(632, 126, 664, 126)
    d.text(690, 131, "y", "mono")
    d.text(506, 182, d.say("side by side", "lado a lado"), "small")
    d.text(604, 182, d.say("lets heads mix", "las mezcla"), "small")
    return d.svg(
        d.say("Several heads", "Varias cabezas"),
        d.say(
            "The tokens go into three heads, each with matrices W_Q, W_K, W_V of its own and a question of "
            "its own: which person, which verb, which tense. Their results are put side by side and go "
            "through W_O.",
            "Los tokens entran en tres cabezas, cada una con sus matrices W_Q, W_K, W_V y su pregunta: qué "
            "persona, qué verbo, qué tiempo. Los resultados se ponen uno al lado del otro y pasan por W_O.",
        ),
    )


def split(language: str) -> str:
    d = Drawing(language, 720, 280)
    rows = [[f"c{j // 2}" for j in range(6)] for _ in range(3)]
    d.text(92, 28, d.say("(tokens, width)", "(tokens, anchura)"), "head")
    d.grid(30, 44, 22, rows)
    for i in range(3):
        d.text(22, 60 + 22 * i, str(i), "small", "end")
    d.arrow(172, 76, 226, 76)
    d.text(199, 66, "reshape", "small")
    d.text(320, 28, d.say("(tokens, heads, d)", "(tokens, cabezas, d)"), "head")
    for i in range(3):
        for h in range(3):
            d.grid(240 + 58 * h, 44 + 22 * i, 22, [[f"c{h}"] * 2])
    d.arrow(424, 76, 486, 76)
    d.text(455, 66, "transpose", "small")
    d.text(594, 28, d.say("(heads, tokens, d)", "(cabezas, tokens, d)"), "head")
    for h in range(3):
        d.grid(500 + 66 * h, 44, 22, [[f"c{h}"] * 2 for _ in range(3)])
        d.text(522 + 66 * h, 126, d.say(f"head {h}", f"cabeza {h}"), "small")
    d.text(
        20,
        168,
        d.say("The bug: reshape straight to (heads, tokens, d)", "El error: reshape directo a (cabezas, tokens, d)"),
        "head",
        "start",
    )
    flat = [f"c{j // 2}" for _ in range(3) for j in range(6)]
    for h in range(3):
        cells = [flat[6 * h + 2 * t : 6 * h + 2 * t + 2] for t in range(3)]
        d.grid(30 + 66 * h, 184, 22, cells)
        d.text(52 + 66 * h, 266, d.say(f"head {h}", f"cabeza {h}"), "small")
    d.text(
        250,
        208,
        d.say("The shape is right; each head has one token,", "La forma es correcta; cada cabeza tiene un token,"),
        "",
        "start",
    )
    d.text(
        250, 228, d.say("cut into pieces that pretend to be three.", "cortado en trozos que parecen tres."), "", "start"
    )
    return d.svg(
        d.say("Split into heads, and join", "Separar en cabezas, y unir"),
        d.say(
            "A table of 3 tokens by 6 features. reshape cuts each row into 3 heads of 2 features; transpose "
            "brings the axis of the heads to the front. Joining is the way back. Below, the bug: reshaping at "
            "once gives each head the pieces of a single token.",
            "Una tabla de 3 tokens por 6 componentes. reshape corta cada fila en 3 cabezas de 2 componentes; "
            "transpose lleva el eje de las cabezas al frente. Unir es el camino de vuelta. Abajo, el error: "
            "un reshape directo da a cada cabeza los trozos de un solo token.",
        ),
    )


def groups(language: str) -> str:
    d = Drawing(language, 720, 230)
    for place, (name, n_kv) in enumerate((("MHA", 6), ("GQA", 2), ("MQA", 1))):
        x = 24 + 236 * place
        spread = 33 * 6
        d.text(x + 98, 28, name, "head")
        for h in range(6):
            g = h * n_kv // 6
            d.box(x + 33 * h, 44, 28, 34, f"q{h}", f"c{g % 3}", "mono")
            target = x + 97 + (g - (n_kv - 1) / 2) * (spread / n_kv)
            d.arrow(x + 14 + 33 * h, 80, target, 126)
        for g in range(n_kv):
            middle = x + 97 + (g - (n_kv - 1) / 2) * (spread / n_kv)
            d.box(middle - 14, 128, 28, 34, f"kv{g}" if n_kv < 6 else str(g), f"c{g % 3}", "mono")
        d.text(x + 98, 188, d.say(f"cache: {n_kv} of 6", f"caché: {n_kv} de 6"), "")
        about = {
            6: d.say("each has its own", "cada una la suya"),
            2: d.say("neighbours share", "comparten vecinas"),
            1: d.say("all share one", "todas comparten una"),
        }
        d.text(x + 98, 208, about[n_kv], "small")
    return d.svg(
        d.say("MHA, GQA, MQA", "MHA, GQA, MQA"),
        d.say(
            "Six query heads. In multi-head attention each reads a key/value head of its own; in grouped- "
            "query attention heads 0 to 2 read the first of two and 3 to 5 the second; in multi-query "
            "attention all read one.",
            "Seis cabezas de consulta. En MHA cada una lee su propia cabeza de claves y valores; en GQA las "
            "cabezas 0 a 2 leen la primera de dos y las 3 a 5 la segunda; en MQA todas leen una.",
        ),
    )


def cache(language: str) -> str:
    d = Drawing(language, 720, 230)
    words = ("he", "will", "write", "=", "él")
    d.text(
        20,
        30,
        d.say("The cache: keys and values of what was read", "La caché: claves y valores de lo ya leído"),
        "head",
        "start",
    )
    for i, word in enumerate(words):
        x, new = 30 + 110 * i, i == 4
        d.text(x + 40, 60, word, "mono")
        d.box(x, 72, 80, 30, d.say("key", "clave") + f" {i}", "c1" if new else "c0")
        d.box(x, 108, 80, 30, d.say("value", "valor") + f" {i}", "c1" if new else "c2")
        d.arrow(520, 186, x + 46, 144)
    d.box(446, 186, 158, 32, d.say("query 4 (new)", "consulta 4 (nueva)"), "c1")
    d.text(640, 92, d.say("appended", "se añaden"), "small")
    d.text(
        20,
        206,
        d.say(
            "1 query looks at 5 keys: no row is computed twice.", "1 consulta mira 5 claves: nada se calcula dos veces."
        ),
        "",
        "start",
    )
    return d.svg(
        d.say("The key/value cache", "La caché de claves y valores"),
        d.say(
            "Keys and values of the tokens he, will, write and = wait in the cache. The new token él appends "
            "its own, and its query looks at all five.",
            "Las claves y los valores de los tokens he, will, write y = esperan en la caché. El token nuevo "
            "él añade los suyos, y su consulta mira los cinco.",
        ),
    )


def cross(language: str) -> str:
    d = Drawing(language, 720, 250)
    english, spanish = ("he", "will", "write"), ("él", "escribirá")
    d.text(20, 32, d.say("memory: the English text", "memoria: el texto inglés"), "head", "start")
    for j, word in enumerate(english):
        d.box(30 + 130 * j, 44, 100, 34, word, "c0", "mono")
        d.text(80 + 130 * j, 96, d.say("key, value", "clave, valor"), "small")
    d.text(20, 236, d.say("x: the Spanish text, being written", "x: el texto español, que se escribe"), "head", "start")
    for i, word in enumerate(spanish):
        d.box(60 + 190 * i, 176, 120, 34, word, "c1", "mono")
        d.text(120 + 190 * i, 168, d.say("query", "consulta"), "small")
    for i, j in ((0, 0), (1, 1), (1, 2)):
        d.arrow(120 + 190 * i, 154, 80 + 130 * j, 102)
    x, y = 520, 92
    d.grid(x, y, 50, [["c0", "off", "off"], ["off", "c0", "c0"]])
    for j, word in enumerate(english):
        d.text(x + 24 + 50 * j, y - 8, word, "small")
    for i, word in enumerate(spanish):
        d.text(x - 8, y + 30 + 50 * i, word, "mono", "end")
    d.text(x + 74, y + 124, d.say("weights: an alignment", "pesos: un alineamiento"), "small")
    return d.svg(
        d.say("Cross attention", "Atención cruzada"),
        d.say(
            "Queries come from the Spanish words él and escribirá, keys and values from the English words he, "
            "will, write. él looks at he, escribirá at will and write: the weights are an alignment of the "
            "two texts.",
            "Las consultas vienen de las palabras españolas él y escribirá, las claves y los valores de las "
            "inglesas he, will, write. él mira he; escribirá mira will y write: los pesos son un alineamiento "
            "de los dos textos.",
        ),
    )


def single(language: str) -> str:
    d = Drawing(language, 720, 270)
    words = ("he", "works", "=", "él")
    one = (0.45, 0.45, 0.1)  # what a single head gives to the three words: a compromise
    several = ((0.9, 0.06, 0.04), (0.06, 0.88, 0.06))
    d.text(170, 28, d.say("one head", "una cabeza"), "head")
    d.text(530, 28, d.say("several heads", "varias cabezas"), "head")
    for left in (30, 390):
        for i, word in enumerate(words):
            d.box(left + 72 * i, 44, 66, 32, word, "c1" if word == "él" else "box", "mono")

    def weights(left: float, top: float, shares: tuple[float, ...], kind: str) -> None:
        for i, share in enumerate(shares):
            d.box(left + 72 * i + 18, top + 54 - 50 * share, 30, 50 * share, kind=kind)
            d.text(left + 72 * i + 33, top + 70, f"{share:.2f}", "small")

    weights(30, 84, one, "c0")
    d.text(170, 190, d.say("one set of weights, which adds up to 1:", "un solo juego de pesos, que suma 1:"), "small")
    d.text(170, 208, d.say("person and verb must share it", "persona y verbo lo comparten"), "small")
    for h, shares in enumerate(several):
        weights(390, 84 + 74 * h, shares, ("c0", "c2")[h])
        d.text(640, 122 + 74 * h, d.say(f"head {h}", f"cabeza {h}"), "small")
    d.text(
        530,
        250,
        d.say("each has weights of its own that add up to 1", "cada una tiene sus pesos, que suman 1"),
        "small",
    )
    return d.svg(
        d.say("One head, and several", "Una cabeza, y varias"),
        d.say(
            "The token él looks at he, works and =. A single head has one set of "
            "weights, 0.45, 0.45 and 0.10: to look at "
            "both the person and the verb it must divide itself. Two heads give 0.90 to he and 0.88 to works.",
            "El token él mira a he, works y =. Una sola cabeza tiene un juego de "
            "pesos, 0.45, 0.45 y 0.10: para mirar a la "
            "persona y al verbo tiene que repartirse. Dos cabezas dan 0.90 a he y 0.88 a works.",
        ),
    )


def slices(language: str) -> str:
    d = Drawing(language, 720, 270)
    d.box(24, 70, 70, 44, "x (16)", "box", "mono")
    d.arrow(94, 92, 132, 92)
    d.box(134, 52, 90, 80, "W_Q", "box", "mono")
    d.text(179, 150, "16 \u00d7 16", "small")
    d.arrow(224, 92, 262, 92)
    kinds = ("c0", "c1", "c2", "off")
    for j in range(16):
        d.box(264 + 26 * j, 78, 24, 28, kind=kinds[j // 4])
    d.text(472, 62, "q (16)", "mono")
    for h, kind in enumerate(kinds):
        left = 264 + 104 * h
        d.arrow(left + 51, 108, left + 51, 150)
        d.box(left, 152, 102, 44, kind=kind)
        d.text(left + 51, 171, d.say(f"head {h}", f"cabeza {h}"), "head")
        d.text(left + 51, 188, f"q[{4 * h}:{4 * h + 4}]", "mono")
        d.box(left, 214, 102, 24, kind=kind)
    d.text(24, 231, d.say("x_attn, 16 again, then W_O", "x_attn, otra vez 16, y W_O"), "", "start")
    d.text(24, 190, d.say("attention, 4 wide each", "atención, de 4 cada una"), "", "start")
    return d.svg(
        d.say("One projection, cut into four heads", "Una proyección, cortada en cuatro cabezas"),
        d.say(
            "One matrix W_Q of 16 by 16 makes the whole query of a token, 16 "
            "numbers. Head 0 takes numbers 0 to 3, head 1 "
            "takes 4 to 7, and so on: no head has a matrix of its own. Keys and "
            "values are cut alike; the results of the "
            "four heads, put side by side, are 16 numbers again, which W_O mixes.",
            "Una sola matriz W_Q de 16 por 16 hace toda la consulta de un token, "
            "16 números. La cabeza 0 toma los números 0 "
            "a 3, la cabeza 1 los 4 a 7, y así sucesivamente: ninguna cabeza tiene "
            "matriz propia. Claves y valores se cortan "
            "igual; las salidas de las cuatro, una al lado de otra, son otra vez 16 números, que W_O mezcla.",
        ),
    )


FIGURES: dict[str, Callable[[str], str]] = {
    figure.__name__: figure for figure in (head, mask, heads, single, split, slices, groups, cache, cross)
}


def pictures() -> dict[str, str]:
    """Every figure by the name of its file."""
    return {f"{name}.{language}.svg": draw(language) for name, draw in FIGURES.items() for language in LANGUAGES}


def main() -> None:
    for folder in PLACES:
        folder.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures().items():
            (folder / name).write_text(picture, encoding="utf-8")
    print(f"wrote {len(pictures())} figures into {' and '.join(str(folder.relative_to(ROOT)) for folder in PLACES)}")


if __name__ == "__main__":
    main()
