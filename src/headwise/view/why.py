"""The story of a prediction: a screen of text, and a page with the heads, their paths, and what they look at."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path as File
from string import Template

from rich.console import Console

from headwise.files import write_whole
from headwise.markup import number
from headwise.records import Story, StoryHead
from headwise.view.page.assemble import json_block, package_text, page, word
from headwise.view.page.words import LANGUAGES
from headwise.view.page.words import say as phrase
from headwise.view.tables import print_table, say


def sentence(story: Story, part: StoryHead, lang: str) -> str:
    """A head in words: what it carries or adds, where it looks, and what happens without it."""
    t, weight = part.looks[0]
    values = {"head": part.head, "at": story.tokens[t], "weight": f"{weight:.2f}", "answer": story.answer}
    if part.brings is None:
        first = phrase(lang, "why.adds" if part.adds >= 0 else "why.takes", adds=f"{abs(part.adds):.2f}", **values)
    else:
        first = phrase(lang, "why.carries", share=f"{100 * part.brings:.0f} %", **values)
    words = [first, phrase(lang, "why.looks", **values)]
    if part.without is not None:
        after = story.probability * math.exp(part.without)
        before = f"{story.probability:.3f}"
        words.append(phrase(lang, "why.without", before=before, after=f"{after:.3f}", **values))
    return " ".join(words)


def told(story: Story) -> list[StoryHead]:
    """The heads that have a place in the story: those with a clear share, or else the three that add most."""
    clear = [part for part in story.heads[: Story.MOST] if part.brings is not None and abs(part.brings) >= Story.CLEAR]
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
            number(part.adds, 2, signed=True),
            number(part.brings, 2, signed=True),
            ", ".join(f"{story.tokens[t]} {weight:.2f}" for t, weight in part.looks),
            number(part.without, 2, signed=True),
        )
        for part in story.heads[: Story.MOST]
    ]
    print_table(console, "", heading, rows, (0, 3))
    values = {"logit": f"{story.logit:.2f}", "heads": f"{math.fsum(part.adds for part in story.heads):+.2f}"}
    values |= {"embedding": f"{story.embedding:+.2f}", "bias": f"{story.bias:+.2f}"}
    values["feed"] = f"{math.fsum(story.feed_forwards.values()):+.2f}"
    say(console, phrase(lang, "why.sum", **values))
    for path in story.paths:
        values = {"sender": path.sender, "receiver": path.receiver, "share": f"{100 * path.effect:.0f} %"}
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
    """Write the story as one HTML page; its script draws the heads and tints the words that the chosen one looks at."""
    told_names = [part.head for part in told(story)]
    sentences = {lang: [sentence(story, part, lang) for part in told(story)] for lang in LANGUAGES}
    opening = {lang: _opening(story, lang) for lang in LANGUAGES}
    data = {**asdict(story), "told": told_names, "sentences": sentences, "opening": opening}
    document = page(
        "why",
        Template(package_text("why.html")).substitute(heading=word("why.title", "h1", answer=story.answer)),
        title=word("why.title", "title", answer=story.answer),
        styles=("why.css",),
        scripts=("why.js",),
        data={"story": json_block(data)},
        words=("why",),
        lang=lang,
    )
    write_whole(path, document)
