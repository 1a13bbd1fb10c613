"""One HTML file in which a person touches the heads of a model: a sentence, every head's map of it, and all numbers.

Python brings the data and the frame; the scripts of the page (`report_*.js`, each one subject) make everything that is
seen. Whatever a model or a text brings is data: the scripts put it in the page as text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from headwise.files import write_whole
from headwise.heads.profiles import Survey
from headwise.markup import escaped
from headwise.records import HeadMaps, RunSummary
from headwise.view import film as film_page
from headwise.view.page.assemble import json_block, package_text, page, word
from headwise.view.survey_data import plain_data, survey_data
from headwise.view.survey_words import columns_of

STYLES = (
    "report_look.css",
    "report_heads.css",
    "report_head.css",
    "report_table.css",
    "report_roles.css",
    "report_run.css",
)
PARTS = (
    *("state", "colours", "model", "shown", "pictures", "sentence", "grid", "own", "next", "silence"),
    *("map", "head", "filter", "table", "roles", "run", "top", "address", "start"),
)  # in this order one script
SCRIPTS = ("page/tokens.js", "page/model.js", *(f"report_{name}.js" for name in PARTS))
WORDS = ("report", "sentence", "column", "meaning", "role", "job", "told", "fact", "against")


def write_report(path: str | Path, survey: Survey, *more: Any, **options: Any) -> None:
    """Write the page of `report_html`, whole or not at all."""
    write_whole(path, report_html(survey, *more, **options))


def report_html(
    survey: Survey,
    maps: HeadMaps | None = None,
    summary: RunSummary | None = None,
    against: Survey | None = None,
    against_maps: HeadMaps | None = None,
    model: Mapping[str, Any] | None = None,
    lang: str = "en",
    film: film_page.Film | None = None,
) -> str:
    """The report of a survey as one HTML file.

    maps          exact maps of a short text, each (T, T) for T tokens, which the page opens with; matched by name
    summary       the training run, told last
    against       the survey of another model, compared head by head, by name
    against_maps  exact maps of the same tokens in that model
    model         the model itself, from `models.pack.pack_model`; the page then runs it on the reader's own text
    lang          the language that the page opens in: en or es; a switch is in it
    film          what the heads did while the model trained
    """
    pane = package_text("report_pane.html")
    blocks = {}
    if film is not None:
        blocks["film-data"] = film_page.film_data(film, {profile.name: profile.roles for profile in survey.profiles})
    body = Template(package_text("report.html")).substitute(
        heading=_heading(survey, against), film=film_page.film_section() if film else "", panes=2 * pane
    )
    name = survey.model if against is None else f"{survey.model} · {against.model}"
    data = survey_data(survey, columns_of(survey, against), maps, summary, against, against_maps)
    return page(
        "report",
        body,
        title=word("report.title", "title", model=name),
        styles=(*STYLES, *film_page.STYLES),
        scripts=(*SCRIPTS, *film_page.SCRIPTS),
        data={"data": json_block(plain_data(data)), "model": json_block(model), **blocks},
        words=(*WORDS, *film_page.WORDS),
        lang=lang,
    )


def _heading(survey: Survey, against: Survey | None) -> str:
    if against is None:
        return f'<bdi dir="auto">{escaped(survey.model)}</bdi>'
    other = f'<bdi class="against"><small>{word("report.against")}</small> {escaped(against.model)}</bdi>'
    return f"<bdi>{escaped(survey.model)}</bdi> {other}"
