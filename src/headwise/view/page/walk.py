"""The guided walk through one head: eight steps in a page that runs the model, so that all can be changed."""

from __future__ import annotations

from string import Template
from typing import Any

from headwise.errors import HeadwiseError
from headwise.markup import escaped
from headwise.view.page.assemble import json_block, package_text, page, word

REASONS = {
    "foreign": "it is no model of headwise",
    "reshaped": "its layers differ from one another",
    "latent": "its heads make keys and values of a latent, which the page cannot follow",
    "size": "it has {parameters:,} parameters, and a page carries at most {most:,}",
    "tokenizer": "its tokenizer has what the page cannot follow: {part}",
    "range": "it has weights too large for 16 bits",
}


def walk_html(
    model: dict[str, Any],
    text: str,
    layer: int,
    head: int,
    at: int,
    name: str = "",
    lang: str = "en",
    report: str | None = None,
) -> str:
    """The page; it begins with head `head` of layer `layer` at position `at` of a text.

    model   the model as `models.pack.pack_model` packs it
    name    what the model is called
    lang    es for a page that opens in Spanish; en for one that opens in the browser's language
    report  the address of the model's report, seen from the page; None where there is none

    Raises HeadwiseError for a language that is not en or es, and for a model that does not run in a page.
    """
    if "reason" in model:
        why = REASONS[model["reason"]].format(**model)
        raise HeadwiseError(f"the walk runs the model in the page, and this one does not: {why}; leave out html=")
    config = model["config"]
    facts = {
        "name": name,
        "layers": config["n_layers"],
        "heads": config["n_heads"],
        "width": config["d_model"],
        "parameters": f"{model['parameters']:,}",
    }
    halved = word("walk.halved", "p", 'class="caption"', error=f"{model['error']:.1g}") if model["error"] else ""
    body = Template(package_text("page/walk.html")).substitute(facts=escaped(json_block(facts)), halved=halved)
    start = {"text": text, "layer": layer, "head": head, "at": at, "report": report}
    return page(
        "walk",
        body,
        title=word("walk.title", "title", name=name),
        styles=("page/walk.css",),
        script="page/walk.js",
        data={"model": json_block(model), "start": json_block(start)},
        words=("walk",),
        lang=lang,
    )
