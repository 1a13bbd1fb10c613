"""The film of a training in a page: its place, its style and script, and its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headwise.view.page.assemble import json_block, package_text

STYLES, SCRIPTS, WORDS = ("film.css",), ("film.js",), ("film", "role")
LOSSES = 400  # points of the curve in a page, at most

Film = tuple[dict[str, Any], Sequence[dict[str, Any]], Sequence[dict[str, Any]]]  # header, frames, rows of the losses


def film_section() -> str:
    """Where the script shows a film; hidden where there is none."""
    return package_text("film.html")


def film_data(film: Film, known: Mapping[str, Sequence[str]]) -> str:
    """The block of data for a report, by the name `film-data`. `known` are the roles that a survey awards each head."""
    header, frames, losses = film
    every = -(-len(losses) // LOSSES)
    kept = [row for n, row in enumerate(losses) if n % every == 0 or "held_out_loss" in row]
    seen = [{name: frame[name] for name in ("step", "alike", "roles", "maps")} for frame in frames]
    return json_block({"header": header, "frames": seen, "losses": kept, "known": dict(known)})
