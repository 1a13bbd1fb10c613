"""An encoder-decoder on the verb corpus: its cross attention is an alignment of English and Spanish.

    python examples/alignment.py        # a model trains in ten seconds; writes docs/alignment.md and its figure

The encoder reads `he will write`, the decoder writes `él escribirá` and looks at what the encoder made of each English
word. Nobody tells it which word translates which: it only learns to write the right Spanish word next. Where it looks
at that moment is compared with an alignment that follows from the grammar. The encoder treats each word by itself;
where its words may mix by self attention, a look at a word is no longer a look at that word alone, and this is measured
beside it.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from figures import LANGUAGES, Drawing
from torch import Tensor, nn

import headwise as hw
from headwise.corpus import verbs
from headwise.heads.alignment import Alignment, Linked, align
from headwise.intervals import held_apart

DOCS = Path(__file__).resolve().parents[1] / "docs"
WIDTH, N_HEADS, STEPS, BATCH, RATE = 48, 4, 500, 64, 4e-3
SEEDS = (0, 1, 2)
PAD, END = 0, 1  # PAD fills up a text; END begins and ends a Spanish one
PICTURED = (("write", "future", "he"), ("work", "progressive", "I"), ("eat", "present", "you"))


class Block(nn.Module):
    """Attention to the own text, in a decoder also to the memory, then a feed-forward; each added to the stream."""

    def __init__(self, mask: hw.Mask | None = None, own: bool = True, cross: bool = False) -> None:
        super().__init__()
        self.own = hw.MultiHeadAttention(WIDTH, N_HEADS, mask=mask) if own else None
        self.cross = hw.MultiHeadAttention(WIDTH, N_HEADS) if cross else None
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, padding: hw.Mask | None, memory: Tensor | None = None) -> Tensor:
        """x (B,T,c); the padding is that of the memory where there is one, else that of x."""
        if self.own is not None:
            x = x + self.own(self.norms[0](x), mask=None if memory is not None else padding)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), context=memory, mask=padding)
        result: Tensor = x + self.feed_forward(self.norms[2](x))
        return result


class Translator(nn.Module):
    """English ids (B,S) and the Spanish ones so far (B,T) -> logits (B,T,V) of the next Spanish word."""

    def __init__(self, n_english: int, n_spanish: int, longest: int, mixing: bool) -> None:
        super().__init__()
        self.english, self.spanish = nn.Embedding(n_english, WIDTH), nn.Embedding(n_spanish, WIDTH)
        self.places = nn.Embedding(longest, WIDTH)
        self.encoder, self.decoder = Block(own=mixing), Block(hw.Causal(), cross=True)
        self.memory_norm, self.last_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, n_spanish)

    def forward(self, english: Tensor, spanish: Tensor) -> Tensor:
        padding = hw.Lengths((english != PAD).sum(1))
        places = self.places.weight
        memory = self.encoder(self.english(english) + places[: english.shape[1]], padding)
        x = self.spanish(spanish) + places[: spanish.shape[1]]
        x = self.decoder(x, padding, self.memory_norm(memory))
        logits: Tensor = self.lm_head(self.last_norm(x))
        return logits


class Words:
    """The words of one language as ids."""

    def __init__(self, texts: list[list[str]]) -> None:
        self.ids = {word: n for n, word in enumerate(sorted({word for text in texts for word in text}), 2)}

    def encode(self, texts: list[list[str]], begin: bool) -> Tensor:
        rows = [torch.tensor([END] * begin + [self.ids[word] for word in text]) for text in texts]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


@dataclass(frozen=True)
class Pairs:
    """All 360 cells of the core as pairs of texts."""

    cells: tuple[verbs.Cell, ...]

    @property
    def english(self) -> list[list[str]]:
        return [cell.english.split() for cell in self.cells]

    @property
    def spanish(self) -> list[list[str]]:
        return [cell.spanish.split() for cell in self.cells]


def right_place(cell: verbs.Cell) -> list[int]:
    """For each Spanish word the English one that it translates, by the grammar.

    The pronoun is the pronoun, and the main verb, the last word, the main verb: `escribirá` is `write`, which `will`
    puts into the future. `estoy` and `he` before it are `am` and `have`.
    """
    last = len(cell.english.split()) - 1
    return [0, 1, last] if len(cell.spanish.split()) == 3 else [0, last]


def possible_places(cell: verbs.Cell) -> list[tuple[int, int]]:
    """Links that are right beside those: one Spanish verb may stand for a helper and its verb, `will write`."""
    return [(1, 1)] if len(cell.spanish.split()) == 2 and len(cell.english.split()) == 3 else []


def chosen(model: Translator, pairs: Pairs, source: Tensor, target: Tensor) -> Alignment:
    """The heads that `align` chooses by half of the cells, judged on the other half."""
    texts = []
    for n, cell in enumerate(pairs.cells):
        inputs = {"english": source[n][source[n] != PAD][None], "spanish": target[n][target[n] != PAD][None]}
        texts.append(Linked(inputs, tuple(enumerate(right_place(cell))), tuple(possible_places(cell))))
    return align(model, *held_apart(texts, random.Random(0)))


def trained(pairs: Pairs, seed: int, steps: int = STEPS, mixing: bool = False) -> tuple[Translator, Tensor, Tensor]:
    """A translator, and the texts as ids: English (n,S), Spanish with END before it (n,T)."""
    torch.manual_seed(seed)
    english, spanish = Words(pairs.english), Words(pairs.spanish)
    source, target = english.encode(pairs.english, begin=False), spanish.encode(pairs.spanish, begin=True)
    model = Translator(len(english.ids) + 2, len(spanish.ids) + 2, 8, mixing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    following = torch.cat([target[:, 1:], torch.full((len(target), 1), PAD)], 1)
    following[torch.arange(len(target)), (target != PAD).sum(1) - 1] = END
    for _ in range(steps):
        chosen = torch.randperm(len(source))[:BATCH]
        logits = model(source[chosen], target[chosen])
        loss = F.cross_entropy(logits.flatten(0, 1), following[chosen].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval(), source, target


@torch.no_grad()
def cross_maps(model: Translator, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Where the decoder looks (n,T,S): the mean weight of the heads; and how much they add from each word together.

    What is added is the length of the sum over heads of weight * W_O v: a weight on a value near 0 is no look at all
    (Kobayashi et al. 2020, arXiv 2004.10102).
    """
    calls: list[Any] = []
    cross: Any = model.decoder.cross
    cross.watchers.append(calls.append)
    model(source, target)
    cross.watchers.remove(calls.append)
    call = calls[0]
    weights = hw.trace(call.q, call.k, call.v, mask=call.options.mask).weights
    values = torch.einsum("hce,nhse->nhsc", torch.stack([head.wo for head in cross.heads]), call.v)
    added = torch.einsum("nhts,nhsc->ntsc", weights, values).norm(dim=-1)
    return weights.mean(1), added


def accuracy(weights: Tensor, cells: tuple[verbs.Cell, ...]) -> float:
    """The share of Spanish words at whose prediction the largest weight (n,T,S) lies on a right English word.

    The word at place t is predicted from the position before it, which is row t: END stands first.
    """
    hits = [
        int(weights[n, t].argmax()) == place
        for n, cell in enumerate(cells)
        for t, place in enumerate(right_place(cell))
    ]
    return sum(hits) / len(hits)


@torch.no_grad()
def exact(model: Translator, source: Tensor, target: Tensor) -> float:
    """The share of texts whose Spanish words are all the likeliest ones, each after the right ones before it."""
    guesses = model(source, target)[:, :-1].argmax(-1)
    right = (guesses == target[:, 1:]) | (target[:, 1:] == PAD)
    return float(right.all(1).float().mean())


def controls(pairs: Pairs) -> tuple[float, float]:
    """The accuracy of looking straight across, word t at word t, and of a look drawn evenly."""
    straight, even = [], []
    for cell, english in zip(pairs.cells, pairs.english, strict=True):
        for t, place in enumerate(right_place(cell)):
            straight.append(t == place)
            even.append(1 / len(english))
    return sum(straight) / len(straight), sum(even) / len(even)


def figure(language: str, pairs: Pairs, weights: Tensor) -> str:
    """The maps of a few cells, darker where more is taken from a word; each row adds up to 1."""
    d = Drawing(language, 720, 230)
    for place, (verb, tense, person) in enumerate(PICTURED):
        cell = verbs.Cell(verb, tense, person)
        n, x, y = pairs.cells.index(cell), 110 + 240 * place, 70
        for j, word in enumerate(cell.english.split()):
            d.text(x + 26 + 54 * j, y - 10, word, "mono")
        for i, word in enumerate(cell.spanish.split()):
            d.text(x - 8, y + 28 + 46 * i, word, "mono", "end")
            for j in range(len(cell.english.split())):
                weight = float(weights[n, i, j])
                d.parts.append(f'<g opacity="{max(0.08, weight):.2f}">')
                d.box(x + 54 * j, y + 46 * i, 52, 44, kind="c0")
                d.parts.append("</g>")
                d.text(x + 26 + 54 * j, y + 27 + 46 * i, f"{weight:.2f}", "small")
    d.text(
        360,
        28,
        d.say("Where the decoder looks as it writes each word", "Dónde mira el decodificador al escribir cada palabra"),
        "head",
    )
    lines = [verbs.Cell(*cell).line for cell in PICTURED]
    return d.svg(
        d.say("Cross attention as an alignment", "La atención cruzada como alineamiento"),
        d.say("Measured cross-attention maps of: ", "Mapas medidos de la atención cruzada de: ") + "; ".join(lines),
    )


def page(language: str, rows: list[tuple[Any, ...]], straight: float, even: float) -> str:
    names = ENCODERS if language == "es" else {name: name for name in ENCODERS}
    lines = [
        f"| {names[encoder]} | {seed} | {translated:.3f} | {mean:.3f} | {added:.3f} | {error:.3f} | {heads} |"
        for encoder, seed, translated, mean, added, error, heads in rows
    ]
    if language == "es":
        return spanish_page(lines, straight, even)
    head = "| encoder | seed | cells written right | mean weight of the heads | what the heads add | error | chosen |"
    table = "\n".join([head, "| --- | --- | --- | --- | --- | --- | --- |", *lines])
    return f"""# Cross attention as an alignment

*[En español](alignment.es.md)*

Written by `python examples/alignment.py`, which trains small encoder-decoders on the core of the verb corpus with
the seeds {SEEDS} and measures. The numbers are of one machine; another may differ in the last digits.

![Where the decoder looks as it writes each word](figures/alignment.en.svg)

The encoder reads English, the decoder writes Spanish: one block each, width {WIDTH}, {N_HEADS} heads of cross
attention. They learn from all 360 cells to write the next Spanish word, in {STEPS} steps, and nothing else. At the
moment of writing a word, does the largest number of the row lie on the English word that it translates? `escribirá`
counts as right on `write` alone, though it also needs `will`.

{table}

Looking straight across, the first word at the first and the second at the second, scores {straight:.3f}; an even look
{even:.3f}. The weights alone are a poor witness: a head may look hard at a word and take nothing from it. What the
heads add from each word is a better one. And where the encoder lets the English words mix by self attention, a look at
a word is no longer a look at that word alone.

*Error* is the alignment error rate (Och & Ney 2003) of the heads that `headwise align` chooses by the weights of half
of the cells, on the other half. There `will` is a possible partner of `escribirá`, beside `write`, the sure one.
"""


def spanish_page(lines: list[str], straight: float, even: float) -> str:
    head = (
        "| encoder | semilla | celdas bien escritas | peso medio de las cabezas | lo que añaden las cabezas | error | "
        "elegidas |"
    )
    table = "\n".join([head, "| --- | --- | --- | --- | --- | --- | --- |", *lines])
    return f"""# La atención cruzada como alineamiento

*[In English](alignment.md)*

Escrito por `python examples/alignment.py`, que entrena pequeños encoder-decoder con el núcleo del corpus de verbos
y las semillas {SEEDS}, y mide. Los números son de una máquina; otra puede diferir en la última cifra.

![Adónde mira el decoder al escribir cada palabra](figures/alignment.es.svg)

El encoder lee inglés y el decoder escribe español: un bloque cada uno, anchura {WIDTH}, {N_HEADS} cabezas de atención
cruzada. Aprenden con las 360 celdas a escribir la siguiente palabra española, en {STEPS} pasos, y nada más. Al escribir
una palabra, ¿está el número mayor de la fila en la palabra inglesa que traduce? `escribirá` cuenta como acierto solo en
`write`, aunque también necesita `will`.

{table}

Mirar en línea recta, la primera palabra a la primera y la segunda a la segunda, da {straight:.3f}; una mirada uniforme,
{even:.3f}. Los pesos solos son mal testigo: una cabeza puede mirar mucho una palabra y no tomar nada de ella. Lo que
las cabezas añaden de cada palabra es mejor testigo. Y donde el encoder deja que las palabras inglesas se mezclen, mirar
una palabra ya no es mirar solo esa palabra.

*Error* es la tasa de error de alineamiento (Och y Ney 2003) de las cabezas que `headwise align` elige por los pesos de
la mitad de las celdas, medida en la otra mitad. Ahí `will` es pareja posible de `escribirá`, junto a `write`, la
segura.
"""


ENCODERS = {"each word by itself": "cada palabra por sí sola", "words mix": "las palabras se mezclan"}


def main() -> None:
    pairs, rows = Pairs(verbs.cells(core=True)), []
    for mixing, encoder in zip((False, True), ENCODERS, strict=True):
        for seed in SEEDS:
            began = time.perf_counter()
            model, source, target = trained(pairs, seed, mixing=mixing)
            mean, added = cross_maps(model, source, target)
            scores = accuracy(mean, pairs.cells), accuracy(added, pairs.cells)
            best = chosen(model, pairs, source, target)
            names = " ".join(name.rpartition(".")[2] for name in best.chosen.heads)
            rows.append((encoder, seed, exact(model, source, target), *scores, best.chosen.error.mean, names))
            print(*rows[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
            if seed == SEEDS[0] and not mixing:
                for language in LANGUAGES:
                    picture = figure(language, pairs, added / added.sum(-1, keepdim=True))
                    (DOCS / "figures" / f"alignment.{language}.svg").write_text(picture, encoding="utf-8")
    for language, name in (("en", "alignment.md"), ("es", "alignment.es.md")):
        (DOCS / name).write_text(page(language, rows, *controls(pairs)), encoding="utf-8")
        print(f"wrote {DOCS / name}")


if __name__ == "__main__":
    main()
