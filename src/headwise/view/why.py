"""The story of a prediction as a page, with the heads, their paths, and what they look at."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path as File
from string import Template

from headwise.files import write_whole
from headwise.story import Story
from headwise.view.page.assemble import json_block, package_text, page, word
from headwise.words import LANGUAGES


def story_page(path: str | File, story: Story, lang: str = "en") -> None:
    """Write the story as one HTML page; its script draws the heads and tints the words that the chosen one looks at.

    Args:
        path: of the page, or an open file
        story: what `why` gave
        lang: in which the page opens, "en" or "es"; it has a switch
    """
    told = [part.head for part in story.told]
    sentences = {lang: [story.sentence(part, lang) for part in story.told] for lang in LANGUAGES}
    opening = {lang: story.opening(lang) for lang in LANGUAGES}
    closing = {lang: story.closing(lang) for lang in LANGUAGES}
    moves = {part.head: story.moves(part) for part in story.heads}
    data = {**asdict(story), "told": told, "sentences": sentences, "opening": opening, "closing": closing}
    answer = story.answer.strip() or story.answer
    document = page(
        "why",
        Template(package_text("why.html")).substitute(heading=word("why.title", "h1", answer=answer)),
        title=word("why.title", "title", answer=answer),
        styles=("why.css",),
        script="why.js",
        data={"story": json_block({**data, "moves": moves})},
        words=("why",),
        lang=lang,
    )
    write_whole(File(path), document)
