"""The story of a prediction: a screen of text, and a page with the heads, their paths, and what they look at."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path as File

from rich.console import Console

from headwise.files import write_whole
from headwise.markup import escaped
from headwise.records import Story, StoryHead, parse_head
from headwise.view.page.assemble import json_block, page, word
from headwise.view.page.words import say as phrase
from headwise.view.tables import print_table, say

MOST = 8  # heads in the table
WIDE, HIGH, MARGIN = 640, 84, 40  # of the drawing: its width, the room of a layer, what stays free around


def sentence(story: Story, part: StoryHead, lang: str) -> str:
    """A head in words: what it carries or adds, where it looks, and what happens without it."""
    t, weight = part.looks[0]
    values = {"head": part.head, "at": story.tokens[t], "weight": f"{weight:.2f}", "answer": story.answer}
    if part.brings is None:
        first = phrase(lang, "why.adds" if part.adds >= 0 else "why.takes", adds=f"{abs(part.adds):.2f}", **values)
    else:
        first = phrase(lang, "why.carries", share=f"{part.brings:.0%}", **values)
    words = [first, phrase(lang, "why.looks", **values)]
    if part.without is not None:
        after = story.probability * math.exp(part.without)
        before = f"{story.probability:.3f}"
        words.append(phrase(lang, "why.without", before=before, after=f"{after:.3f}", **values))
    return " ".join(words)


def told(story: Story) -> list[StoryHead]:
    """The heads that have a place in the story: those with a clear share, or else the three that add most."""
    clear = [part for part in story.heads[:MOST] if part.brings is not None and abs(part.brings) >= Story.CLEAR]
    return clear or list(story.heads[:3])


def print_story(console: Console, story: Story, lang: str = "en") -> None:
    """One screen: the prediction, the heads that matter in words, then all of them in a table, and the paths."""
    for line in _opening(story, lang):
        say(console, line.replace("*", ""))
    for part in told(story):
        say(console, f"  {sentence(story, part, lang)}".replace("*", ""))
    names = ("head", "adds", "carries", "looks", "without")
    heading = [phrase(lang, f"why.column_{name}") for name in names]
    rows = [
        (
            part.head,
            f"{part.adds:+.2f}",
            "-" if part.brings is None else f"{part.brings:+.2f}",
            ", ".join(f"{story.tokens[t]} {weight:.2f}" for t, weight in part.looks),
            "-" if part.without is None else f"{part.without:+.2f}",
        )
        for part in story.heads[:MOST]
    ]
    print_table(console, "", heading, rows, (0, 3))
    others = math.fsum(part.adds for part in story.heads[MOST:])
    values = {"logit": f"{story.logit:.2f}", "heads": f"{math.fsum(part.adds for part in story.heads):+.2f}"}
    values |= {"embedding": f"{story.embedding:+.2f}", "bias": f"{story.bias:+.2f}", "others": f"{others:+.2f}"}
    values["feed"] = f"{math.fsum(story.feed_forwards.values()):+.2f}"
    say(console, phrase(lang, "why.sum", **values))
    for path in story.paths:
        values = {"sender": path.sender, "receiver": path.receiver, "share": f"{path.effect:.0%}"}
        say(console, phrase(lang, f"why.path_{path.at}", **values))


def _opening(story: Story, lang: str) -> list[str]:
    text = " ".join(story.tokens)
    values = {"text": text, "answer": story.answer, "other": story.other, "chance": f"{story.probability:.3f}"}
    lines = [phrase(lang, "why.predicts", **values)]
    if story.predicted != story.answer:
        chance = f"{story.predicted_probability:.3f}"
        lines.append(phrase(lang, "why.rather", predicted=story.predicted, chance=chance))
    if story.corrupted is None:
        lines.append(phrase(lang, "why.compared", **values))
    else:
        lines.append(phrase(lang, "why.corrupted", **{**values, "text": " ".join(story.corrupted)}))
    return lines


def story_page(path: File, story: Story, lang: str = "en") -> None:
    """Write the story as one HTML page. Its script tints the words that the chosen head looks at."""
    how = word("why.how", "p", 'class="caption"')
    body = "".join(
        (
            f'<header><p class="kicker">{word("why.kicker")}</p>',
            f"{word('why.title', 'h1', answer=story.answer)}</header><main>",
            _chips(story),
            '<section id="opening" class="lede"></section>',
            '<section id="heads" class="heads" role="group" data-word-aria-label="why.heads"></section>',
            f"<section>{word('why.map', 'h2')}{_drawing(story)}{how}</section>",
            '<section><details><summary data-word="why.numbers"></summary>'
            '<div id="numbers" class="scroll" tabindex="0" '
            'role="region" data-word-aria-label="why.numbers"></div></details></section></main>',
        )
    )
    told_names = [part.head for part in told(story)]
    sentences = {lang: [sentence(story, part, lang) for part in told(story)] for lang in ("en", "es")}
    opening = {lang: _opening(story, lang) for lang in ("en", "es")}
    data = {**asdict(story), "told": told_names, "sentences": sentences, "opening": opening}
    document = page(
        "why",
        body,
        title=word("why.title", "title", answer=story.answer),
        styles=("why.css",),
        scripts=("why.js",),
        data={"story": json_block(data)},
        words=("why",),
        lang=lang,
    )
    write_whole(path, document)


def _chips(story: Story) -> str:
    tokens = "".join(
        f'<span class="token" data-token="{t}">{escaped(text)}</span>' for t, text in enumerate(story.tokens)
    )
    return f'<p class="tokens" id="prompt" lang="">{tokens}<span class="answer">{escaped(story.answer)}</span></p>'


def _drawing(story: Story) -> str:
    """Layers from below to above, the heads of the story in them, the paths between, and the answer on top."""
    parts = {part.head: part for part in story.heads}
    names = {part.head for part in told(story)} | {path.sender for path in story.paths}
    names |= {path.reader for path in story.paths}
    layers = 1 + max(parse_head(name)[1] for name in parts)
    size = 1 + max(parse_head(name)[2] for name in parts)
    height = HIGH * (layers + 1) + MARGIN

    def place(name: str) -> tuple[float, float]:
        _, layer, head = parse_head(name)
        return MARGIN + (head + 0.5) * (WIDE - 2 * MARGIN) / size, height - MARGIN - HIGH * (layer + 0.5)

    top = (WIDE / 2, MARGIN / 2 + 12)
    shapes = [
        f'<line class="layer" x1="{MARGIN}" x2="{WIDE - MARGIN}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="name" x="4" y="{y + 4:.1f}">L{layer}</text>'
        for layer in range(layers)
        for y in [height - MARGIN - HIGH * (layer + 0.5)]
    ]
    whole = max(1.0, abs(story.logit))
    shapes += [_line(place(name), top, "direct", min(1.0, abs(parts[name].adds) / whole)) for name in sorted(names)]
    for path in story.paths:
        kind = f"path {path.at}"
        shapes.append(_line(place(path.sender), place(path.reader), kind, min(1.0, abs(path.effect))))
    for name in sorted(names):
        strength = parts[name].adds if parts[name].brings is None else parts[name].brings
        shapes.append(_node(name, place(name), abs(strength or 0.0)))
    shapes.append(f'<text class="goal" x="{top[0]}" y="{top[1] - 4}">{escaped(story.answer)}</text>')
    return (
        f'<svg viewBox="0 0 {WIDE} {height}" role="img" data-word-aria-label="why.map" class="drawing">'
        f"{''.join(shapes)}</svg>"
    )


def _line(start: tuple[float, float], end: tuple[float, float], kind: str, strength: float) -> str:
    (x1, y1), (x2, y2) = start, end
    middle = (y1 + y2) / 2
    width = 1 + 5 * strength
    return (
        f'<path class="{kind}" d="M{x1:.1f} {y1:.1f} C{x1:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {y2:.1f}" '
        f'stroke-width="{width:.1f}"/>'
    )


def _node(name: str, place: tuple[float, float], strength: float) -> str:
    x, y = place
    radius = 9 + 9 * min(1.0, strength)
    return (
        f'<g class="node" data-head="{escaped(name)}"><circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>'
        f'<text x="{x:.1f}" y="{y + radius + 14:.1f}">{escaped(name)}</text></g>'
    )
