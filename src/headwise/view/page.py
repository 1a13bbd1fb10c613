"""Every HTML page is put together here, and is one file that asks for nothing else.

A page has the base style and its own, and one script, made of the ES modules that its own imports; those of all pages
lie in `page/`. A content security policy lets only these run, known by their hashes. A page carries its phrases in
every language: static HTML leaves an element empty and names its phrase, `<p data-word="report.hint"></p>`, or an
attribute's, `<input data-word-placeholder="report.own">`; the base script fills them in. The title and what is said
without a script stand there as text.

Two pages are but data for their scripts, and stand here, too: the guided walk through one head, eight steps in a page
that runs the model, so that all can be changed; and the story of a prediction.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from headwise.errors import HeadwiseError
from headwise.files import write_whole
from headwise.heads.table import Story
from headwise.table import escaped
from headwise.words import LANGUAGES, Facts, check_lang, marked, phrase, phrases

# import { ask } from './ask.js';
_IMPORT = re.compile(r"^import (?:\{[^}]*\} from )?'\./(\w+\.js)';\n", re.MULTILINE)
# that word alone, of "export function"
_EXPORT = re.compile(r"^export (?=\w)", re.MULTILINE)


def package_text(*names: str) -> str:
    """Files of the package `view`, one after the other; names such as `page/base.css`."""
    package = resources.files("headwise.view")
    return "".join(package.joinpath(name).read_text(encoding="utf-8") for name in names)


def frame(name: str, /, **parts: str) -> str:
    """A file of HTML of the package, with the parts in their places, which are `$name` there."""
    return Template(package_text(name)).substitute(parts)


def large_view() -> str:
    """The HTML of an enlarged head, which report and `look` share: two maps can stand side by side."""
    return frame("page/large.html", panes=2 * package_text("page/pane.html"))


def modules(entry: str) -> dict[str, str]:
    """The ES modules of a page by name, each behind those that it imports; none of them import in a circle."""
    texts = {}

    def add(name: str) -> None:
        if name not in texts:
            text = package_text(f"page/{name}")
            for target in _IMPORT.findall(text):
                add(target)
            texts[name] = text

    add(entry)
    return texts


def module_script(entry: str) -> str:
    """One module script of an entry and all that it imports.

    All share the scope of that script, so the lines that import and the word `export` have nothing left to say. That
    names are declared once, and that each module imports what it takes from others, a test sees to.
    """
    whole = "".join(modules(entry).values())
    return _EXPORT.sub("", _IMPORT.sub("", whole))


def page(
    name: str,
    body: str,
    *,
    title: tuple[str, Facts],
    script: str = "base.js",
    styles: Sequence[str] = (),
    data: Mapping[str, str] | None = None,
    words: Sequence[str] = (),
    lang: str = "en",
    served: bool = False,
) -> str:
    """A whole HTML document.

    name     the class of the body, by which style sheets tell pages apart
    body     HTML, its texts escaped already: header and main, and what a page needs besides
    title    the key of its phrase, and the facts of the phrase
    script   the module of `page/` that begins; it brings what it imports
    styles   files of that package, after the base's own, in this order one sheet
    data     blocks of JSON by id, each from `json_block`; scripts read them with `readData(id)`
    words    sections of words.toml that the page uses, besides `page`
    lang     the language that the page opens in
    served   may the page ask its own origin?

    Raises HeadwiseError for a language that is not in the table.
    """
    check_lang(lang)
    style = package_text("page/base.css", *styles)
    code = module_script(script)
    blocks = {**(data or {}), "words": json_block(phrases(("page", *words)))}
    key, facts = title
    scripts = [
        f'<script type="application/json" id="{name}">{block}</script>'
        for name, block in blocks.items()
    ]
    return frame(
        "page/base.html",
        lang=lang,
        # 'self': where the page comes from
        policy=policy(style, code) + ("; connect-src 'self'" if served else ""),
        title=escaped(marked(key, lang, facts, ("", ""))),
        title_word=_named(key, facts),
        style=style,
        name=name,
        no_script=phrase("page.no_script", lang),
        body=body,
        data="\n".join(scripts),
        script=code,
        made_by=word("page.made_by_look" if served else "page.made_by", "p"),
    )


def word(key: str, tag: str = "span", attributes: str = "", **values: Any) -> str:
    """An element that the script fills with a phrase; values may be any text, and are escaped.

    tag, attributes  of the element: `word("why.title", "h1")`
    values           the facts of the phrase, which the element carries
    """
    return f"<{tag} {attributes} {_named(key, values)}></{tag}>"


def _named(key: str, values: Facts) -> str:
    carried = escaped(json.dumps(values, ensure_ascii=False))
    return f'data-word="{key}" data-values="{carried}"'


def json_block(value: Any) -> str:
    """JSON that no HTML parser can take for markup: `<`, `>` and `&` are written as \\u escapes.

    Raises ValueError for NaN and infinity, which JSON does not have and a browser would not read.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def policy(style: str, script: str) -> str:
    """A content security policy: this style and this script by their hashes, images in the page, nothing loaded.

    So what a model or a text brings cannot run, whatever it holds, and the page asks nobody for anything.
    """
    hashes = [hashlib.sha256(text.encode()).digest() for text in (style, script)]
    style_hash, script_hash = (base64.b64encode(digest).decode() for digest in hashes)
    # The last two: no element may change what addresses are relative to, and no form is sent anywhere.
    return (
        f"default-src 'none'; style-src 'sha256-{style_hash}'; script-src 'sha256-{script_hash}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def missing(model: Facts) -> tuple[str, Facts]:
    """The phrase that says why a model was not packed, and its facts."""
    facts = {}
    for name, value in model.items():
        facts[name] = f"{value:,}" if isinstance(value, int) else value
    return f"report.no_model_{model['reason']}", facts


# The guided walk, and the story of a prediction.


def walk_html(
    model: Facts,
    text: str,
    layer: int | None = None,
    head: int | None = None,
    at: int = 0,
    name: str = "",
    lang: str = "en",
    report: str | None = None,
) -> str:
    """The guided walk through one head; it begins with head `head` of layer `layer` at position `at` of a text.

    layer, head  None: the head without which the model's next word at `at` loses most
    model   the model as `models.pack.pack_model` packs it
    name    what the model is called
    lang    es for a page that opens in Spanish; en for one that opens in the browser's language
    report  the address of the model's report, seen from the page; None where there is none

    Raises HeadwiseError for a language that is not en or es, and for a model that does not run in a page.
    """
    if "reason" in model:
        key, facts = missing(model)
        raise HeadwiseError(
            f"the walk runs the model in the page. {phrase(key, **facts)} Leave out html="
        )
    config = model["config"]
    facts = {
        "name": name,
        "layers": config["n_layers"],
        "heads": config["n_heads"],
        "width": config["d_model"],
        "parameters": f"{model['parameters']:,}",
    }
    lede = word("walk.lede", "p", 'class="lede"', **facts)
    body = frame("page/walk.html", lede=lede)
    start = {"text": text, "layer": layer, "head": head, "at": at, "report": report}
    return page(
        "walk",
        body,
        title=("walk.title", {"name": name}),
        styles=("page/walk.css",),
        script="walk.js",
        data={"model": json_block(model), "start": json_block(start)},
        words=("walk",),
        lang=lang,
    )


def story_page(path: str | Path, story: Story, lang: str = "en") -> None:
    """Write the story as one HTML page; its script draws the heads and tints the words that the chosen one looks at.

    Args:
        path: of the page; a file that is there is replaced
        story: what `why` gave
        lang: in which the page opens, "en" or "es"; it has a switch
    """
    # the heads that have a sentence, a part of the story's heads
    data = {**asdict(story), "told": [part.head for part in story.told]}
    data["moves"] = {part.head: story.moves(part) for part in story.heads}
    data["sentences"] = {
        each: [story.sentence(part, each) for part in story.told] for each in LANGUAGES
    }
    for name in ("opening", "closing"):
        data[name] = {each: getattr(story, name)(each) for each in LANGUAGES}
    answer = story.answer.strip() or story.answer  # a token may be spaces alone
    document = page(
        "why",
        frame("page/why.html", heading=word("why.title", "h1", answer=answer)),
        title=("why.title", {"answer": answer}),
        styles=("page/why.css",),
        script="why.js",
        data={"story": json_block(data)},
        words=("why",),
        lang=lang,
    )
    write_whole(path, document)
