"""Every HTML page of the house is put together here, and is one file that asks for nothing else.

A page has the base style and the base script, then its own. A content security policy lets only these run, known by
their hashes. A page carries its phrases in every language: static HTML leaves an element empty and names its phrase,
`<p data-word="report.hint"></p>`, or an attribute's, `<input data-word-placeholder="report.own">`. They are filled in
here in the first language, so that they stand there without a script too; the base script fills them in again when the
reader switches.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import unescape
from importlib import resources
from string import Template
from typing import Any

from headwise.markup import escaped
from headwise.view.page.words import check_lang, phrase_html, phrases, say

_EMPTY = re.compile(r'(<([a-z0-9]+)\b[^<>]*? data-word="([\w.]+)"([^<>]*)>)(</\2>)')
_ATTRIBUTE = re.compile(r' data-word-([a-z-]+)="([\w.]+)"')
_VALUES = re.compile(r'data-values="([^"]*)"')


def package_text(*names: str) -> str:
    """Files of the room `view`, one after the other; names such as `page/base.js`."""
    room = resources.files("headwise.view")
    return "".join(room.joinpath(name).read_text(encoding="utf-8") for name in names)


def page(
    name: str,
    body: str,
    *,
    title: str,
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
    data: Mapping[str, str] | None = None,
    words: Sequence[str] = (),
    lang: str = "en",
    news: bool = False,
) -> str:
    """A whole HTML document.

    name     the class of the body, by which style sheets tell pages apart
    body     HTML, its texts escaped already: header and main, and what a page needs besides
    title    plain text, or the element `word(key, "title", ...)`
    styles, scripts   files of the room `view`, after the base's own, in this order one sheet and one script
    data     blocks of JSON by id, each from `json_block`; scripts read them with `readData(id)`
    words    sections of words.toml that the page uses, besides `page`
    lang     the language that the page opens in
    news     the page is served, and may ask its own origin for news

    Raises HeadwiseError for a language that is not in the table.
    """
    check_lang(lang)
    style = package_text("page/base.css", *styles)
    script = package_text("page/base.js", *scripts)
    blocks = {**(data or {}), "words": json_block(phrases(("page", *words)))}
    template = Template(package_text("page/base.html"))
    return template.substitute(
        lang=lang,
        policy=policy(style, script) + ("; connect-src 'self'" if news else ""),
        title=filled(title if title.startswith("<title") else f"<title>{escaped(title)}</title>", lang),
        style=style,
        name=name,
        body=filled(body, lang),
        data="\n".join(f'<script type="application/json" id="{key}">{block}</script>' for key, block in blocks.items()),
        script=script,
        switch=filled('<nav id="languages" data-word-aria-label="page.language" hidden></nav>', lang),
        made_by=filled(word("page.made_by_live" if news else "page.made_by", "p"), lang),
    )


def word(key: str, tag: str = "span", attributes: str = "", **values: Any) -> str:
    """An element that `page` fills with a phrase; values may be any text, and are escaped."""
    more = f" {attributes}" if attributes else ""
    carried = f' data-values="{escaped(json.dumps(values, ensure_ascii=False))}"' if values else ""
    return f'<{tag}{more} data-word="{key}"{carried}></{tag}>'


def filled(html: str, lang: str) -> str:
    """Every phrase that the HTML names, put in its place."""

    def element(match: re.Match[str]) -> str:
        return f"{match[1]}{phrase_html(lang, match[3], _values(match[0]))}{match[5]}"

    def attribute(match: re.Match[str]) -> str:
        return f'{match[0]} {match[1]}="{escaped(say(lang, match[2]))}"'

    return _ATTRIBUTE.sub(attribute, _EMPTY.sub(element, html))


def _values(element: str) -> dict[str, Any]:
    carried = _VALUES.search(element)
    values: dict[str, Any] = json.loads(unescape(carried[1])) if carried else {}
    return values


def json_block(value: Any) -> str:
    """JSON that no HTML parser can take for markup: `<`, `>` and `&` are written as \\u escapes."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def policy(style: str, script: str) -> str:
    """A content security policy: this style and this script by their hashes, images in the page, nothing loaded."""
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
