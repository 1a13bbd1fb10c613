"""Head cards: what was measured of each head, as JSON that any tool reads, or as a section of a model card."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from headwise.errors import HeadwiseError
from headwise.files import write_whole
from headwise.heads.table import Survey
from headwise.markup import number
from headwise.table import Table

SUFFIXES = (".json", ".md")


def check_card(path: Path) -> None:
    """Raise HeadwiseError for a card that is neither JSON nor Markdown."""
    if path.suffix not in SUFFIXES:
        raise HeadwiseError(f"{path} is no name of a card: .json is for tools, .md a section for a model card")


def write_card(path: Path, survey: Survey) -> None:
    """Write the card of a survey, JSON or Markdown by its suffix; the same survey gives the same bytes."""
    check_card(path)
    write_whole(path, card_json(survey) if path.suffix == ".json" else card_markdown(survey))


def card_json(survey: Survey) -> str:
    """The card with a line for each head."""
    card = survey.card()
    heads = card.pop("heads")
    first = json.dumps(card, ensure_ascii=False, allow_nan=False, indent=1)[: -len("\n}")]
    compact = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    lines = ",\n".join(f"  {json.dumps(name)}: {compact(head)}" for name, head in heads.items())
    return f'{first},\n "heads": {{\n{lines}\n }}\n}}\n'


def card_markdown(survey: Survey) -> str:
    """The heads that have a role, each with its score and what it is held against."""
    card = survey.card()
    rows = []
    for role in survey.roles:
        earners = [profile for profile in survey.profiles if role.name in profile.roles]
        for profile in sorted(earners, key=lambda profile: -profile.scores[role.score].mean):
            score = profile.scores[role.score]
            interval = f"{number(score.mean, 2)} ({number(score.low, 2)} to {number(score.high, 2)})"
            even, untrained = profile.uniform.get(role.score), (survey.untrained or {}).get(role.score)
            effect = None if profile.ablation is None else profile.ablation.mean
            controls = (number(even, 2), number(untrained, 2), number(effect, 3, signed=True))
            rows.append((role.name, profile.name, interval, *controls))
    text = card["text"]
    sources = ", ".join(text["sources"]) or "a text of its own"
    columns = ("role", "head", "score (95 %)", "even", "untrained", "loss without it")
    table = Table(columns, rows).markdown((0, 1)) if rows else "No head has a role on this text."
    lines = [
        "## What the attention heads do",
        f"Measured on {text['tokens']:,} tokens of {sources} in documents of up to {text['longest']:,}. A score is the "
        f'mean over {text["documents"]:,} documents; "even" is attention spread evenly over what the mask allows, '
        f'"untrained" the best head of the same model with untrained weights.',
        table,
        *(f"- {note}" for note in card["notes"]),
        f"SHA-256 of the weights: `{survey.digest or 'not known'}`. Made by headwise.",
    ]
    return "\n\n".join(lines) + "\n"
