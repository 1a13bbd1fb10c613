"""One HTML file that shows what every head of a model does, and its training run where there was one.

The style sheets and the script travel inside the file, which loads nothing and can be opened from a disk. Whatever
a model or a text brings is data: it is escaped here, put in the page as text by the script, and a content
security policy lets only this package's own style and script run, known by their hashes.
"""

from __future__ import annotations

from pathlib import Path
from string import Template
from typing import Any

from headwise.files import write_whole
from headwise.heads.profiles import Survey
from headwise.markup import MISSING, escaped, listed, number, plural
from headwise.records import HeadMaps, RunSummary
from headwise.view.page.assemble import json_block, package_text, page
from headwise.view.run_section import run_section
from headwise.view.survey_data import check_survey, survey_data
from headwise.view.survey_html import roles_section, table_section
from headwise.view.survey_words import columns_of, extent, notes_of
from headwise.view.terminal import check_maps, signs_used, visible

STYLES = ("report.css", "report_heads.css")
PARTS = ("base", "pictures", "grid", "table", "text", "head", "start")  # in this order one script
SCRIPTS = ("page/tokens.js", "page/model.js", *(f"report_{name}.js" for name in PARTS))
LONG = 100  # tokens; a longer text is folded away


def write_report(
    path: str | Path,
    survey: Survey,
    maps: HeadMaps | None = None,
    summary: RunSummary | None = None,
    against: Survey | None = None,
    model: dict[str, Any] | None = None,
) -> None:
    """Write the report of a survey as one HTML file, whole or not at all.

    maps     exact maps of a short text, each (T, T) for T tokens; heads are matched by name
    summary  the training run, told first
    against  the survey of another model, compared head by head, by name
    model    the model itself as `models.pack` packs it, which then runs in the page; or the reason why it does not

    Raises HeadwiseError when there is nothing to draw or when arrays do not fit; see `check_survey` and `check_maps`.
    """
    write_whole(path, report_html(survey, maps, summary, against, model))


def report_html(
    survey: Survey,
    maps: HeadMaps | None = None,
    summary: RunSummary | None = None,
    against: Survey | None = None,
    model: dict[str, Any] | None = None,
) -> str:
    """The page itself; arguments and errors as in `write_report`."""
    check_survey(survey)
    if maps is not None:
        check_maps(maps)
    if against is not None:
        check_survey(against)
    columns = columns_of(survey, against)
    body = Template(package_text("report.html")).substitute(
        heading=_heading(survey, against),
        lede=_lede(survey),
        facts=_facts(survey, against),
        notes=_notes(survey, against),
        summary="" if summary is None else run_section(summary),
        roles=roles_section(survey),
        sources=_sources(survey, maps),
        views=_views(against),
        table=table_section(survey, columns, against),
    )
    name = survey.model if against is None else f"{survey.model} against {against.model}"
    return page(
        "report",
        body,
        title=f"{name}: attention heads",
        styles=STYLES,
        scripts=SCRIPTS,
        data={"data": survey_data(survey, columns, maps, against), "model": json_block(model)},
    )


def _heading(survey: Survey, against: Survey | None) -> str:
    if against is None:
        return f'<h1 dir="auto">{escaped(survey.model)}</h1>'
    other = f'<span class="against"><small>against</small> <bdi>{escaped(against.model)}</bdi></span>'
    return f"<h1><bdi>{escaped(survey.model)}</bdi> {other}</h1>"


def _lede(survey: Survey) -> str:
    """Family, heads, layers, documents and tokens in a line."""
    heads, tokens = extent(survey)
    longest = f", the longest {survey.longest:,}" if survey.n_documents > 1 else ""
    family = f"{escaped(survey.family)} · " if survey.family else ""
    return f"{family}{heads} · {tokens}{longest}"


def _facts(survey: Survey, against: Survey | None) -> str:
    """Where the text came from, and the loss from which the effects of heads are counted."""
    facts = []
    if survey.texts:
        facts.append(f"Text: {escaped(listed(list(survey.texts), 3))}.")
    if survey.loss is not None and number(survey.loss, 3) != MISSING:
        loss = f"Mean loss {number(survey.loss, 3)} nats per token"
        if against is not None and against.loss is not None:
            loss += f"; {escaped(against.model)}: {number(against.loss, 3)}"
        facts.append(f"{loss}.")
    if survey.ablated is not None:
        kind = {"zero": "with zeros for its output", "mean": "with its mean output"}
        facts.append(f"Ablation runs the model without a head: {kind.get(survey.ablated, escaped(survey.ablated))}.")
    return f'<p class="caption">{" ".join(facts)}</p>' if facts else ""


def _notes(survey: Survey, against: Survey | None) -> str:
    items = "".join(f"<li>{escaped(note)}</li>" for note in notes_of(survey, against))
    return f'<ul class="notice notes">{items}</ul>' if items else ""


def _sources(survey: Survey, maps: HeadMaps | None) -> str:
    """The text that was looked at: the first document, and the short text of the exact maps where that is another."""
    sources = []
    if maps is not None and maps.tokens != survey.tokens:
        sources.append(_source("The text of the exact maps", maps.tokens))
    if survey.tokens:
        sources.append(_source("The text" if survey.n_documents == 1 else "The first document", survey.tokens))
    return "".join(sources)


def _source(title: str, tokens: tuple[str, ...]) -> str:
    shown = tuple(map(visible, tokens))
    signs = ", ".join(f"{sign} {name}" for sign, name in signs_used(shown).items())
    words = "".join(f"<bdi>{escaped(token)}</bdi>" for token in shown)
    legend = f'<p class="caption">Signs: {signs}.</p>' if signs else ""
    return (
        f'<details class="source"{" open" if len(tokens) <= LONG else ""}><summary>{title}, '
        f'{plural(len(tokens), "token")}</summary><p class="tokens" dir="ltr">{words}</p>{legend}</details>'
    )


def _views(against: Survey | None) -> str:
    """The switch between two models and their difference."""
    if against is None:
        return ""
    options = (("this", "this model"), ("other", escaped(against.model)), ("difference", "difference"))
    radios = "".join(
        f'<label class="switch"><input type="radio" autocomplete="off" name="view" value="{value}"'
        f"{' checked' if value == 'this' else ''}> <bdi>{text}</bdi></label>"
        for value, text in options
    )
    return f'<fieldset class="views"><legend>Pictures of</legend>{radios}</fieldset>'
