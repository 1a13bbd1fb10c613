"""How pages are put together: their words in two languages, the switch between them, and what no page may do."""

import copy
import re
from pathlib import Path

import pytest
from browsing import Opener, faults
from cases import refuses
from surveys import survey_of

import headwise as hw
from headwise.corpus import verbs
from headwise.records import RunSummary
from headwise.table import escaped
from headwise.view.page import json_block, page, word
from headwise.view.report import survey_data
from headwise.words import LANGUAGES, Note, phrase, table

PACKAGE = Path(hw.__file__).parent
PLACE = re.compile(r"\{(\w+)(:[^{}]*)?\}")
HOSTILE = '</script><img src=x onerror=alert(1)> *b* {n} `k` q_d " data-word="page.made_by'


def sources() -> str:
    """All that may name a phrase."""
    paths = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("view/**/*.js"), *PACKAGE.rglob("view/**/*.html")]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def test_phrases(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, texts in table().items():
        # Statistics bring their meaning in English with them.
        assert set(texts) == ({"es"} if key.startswith("meaning.") else set(LANGUAGES)) and all(texts.values()), key
        if "en" not in texts:
            continue
        english, spanish = ({name for name, _ in PLACE.findall(texts[lang])} for lang in LANGUAGES)
        assert english == spanish, key
        if " " in PLACE.sub("", texts["en"]).strip() and re.search("[a-z]{3}", PLACE.sub("", texts["en"])):
            assert texts["en"] != texts["es"], f"{key} is not translated"
    text, sections = sources(), {key.split(".")[0] for key in table()}
    named = {key for key in re.findall(r"['\"]([a-z]+\.[\w]+)['\"]", text) if key.split(".")[0] in sections}
    prefixes = tuple(re.findall(r"[`'\"]([a-z]+\.(?:\w+_)?)(?:\$?\{|['\"] \+)", text))  # f"role.{name}", 'step.' + name
    prefixes += tuple(f"{x}." for x in re.findall(r'(?:key_of|labelled)\W+"(\w+)"', text))
    files = (".js", ".json", ".jsonl", ".css", ".html", ".md", ".toml", ".txt")
    known = {key for key in named if not key.endswith(files)}
    assert known - set(table()) == set()
    unused = [key for key in table() if key not in known and not key.startswith(prefixes)]
    assert unused == []
    text = "*{n}* {n:head|heads} by `Esc` of k_j: {x}"
    monkeypatch.setitem(table(), "page.test", {"en": text, "es": text})
    assert phrase("page.test", "es", n=2, x="y") == "*2* heads by `Esc` of k_j: y"
    refuses(lambda: page("test", "", title=("page.test", {}), lang="fr"), r"^lang='fr' is not known; one of en, es$")
    note = Note.of("note.silent", heads="L0.H1")
    assert note == "Silent heads, whose output is zero whatever they look at: L0.H1."
    assert copy.deepcopy(note).key == "note.silent"
    survey = survey_of(notes=(note, "of the user's"), texts=(verbs.NAME, "book.txt"))
    run = RunSummary({"text": str(verbs.NAME), "seed": "3"}, (), 1.0, 2.0, "3-gram")
    data = survey_data(survey, None, run)
    assert data["notes"] == [("note.silent", {"heads": "L0.H1"}), "of the user's"]
    assert data["texts"] == [("source.verb_corpus", {}), "book.txt"]
    assert data["run"]["facts"] == [("text", ("source.verb_corpus", {})), ("seed", "3")]
    assert {role["meaning"][0] for role in data["roles"]} <= {key for key in table() if key.startswith("job.")}


def test_json_in_a_page_is_no_markup() -> None:
    assert json_block({"a": "</script>&<!--"}) == '{"a":"\\u003c/script\\u003e\\u0026\\u003c!--"}'


@pytest.mark.browser
def test_a_page_speaks_both_languages(open_page: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phrases = {"en": "*{n}* {n:head|heads}, k_j, `Esc`, {x}", "es": "*{n}* {n:cabeza|cabezas}, k_j, `Esc`, {x}"}
    monkeypatch.setitem(table(), "page.test", phrases)
    monkeypatch.setitem(table(), "page.named", {"en": "*{n}* heads, {x}", "es": "*{n}* cabezas, {x}"})
    body = f'<main>{word("page.test", "h1", n=2, x=HOSTILE)}<input data-word-aria-label="page.language"></main>'
    for lang, other in (("en", "es"), ("es", "en")):
        path = tmp_path / f"{lang}.html"
        html = page("test", body, title=("page.named", {"n": 2, "x": HOSTILE}), lang=lang)
        path.write_text(html, encoding="utf-8")
        title = re.search("<title [^>]*>(.*)</title>", html)[1]
        opened = open_page(path)
        assert escaped(opened.title()) == title and title.startswith("2 heads" if lang == "en" else "2 cabezas")
        first = opened.inner_html("h1")
        assert opened.locator("html").get_attribute("lang") == lang
        assert opened.inner_text("h1").startswith("2 heads" if lang == "en" else "2 cabezas")
        assert opened.inner_text("h1").endswith(HOSTILE) and opened.locator("img").count() == 0
        label = opened.locator("input").get_attribute("aria-label")
        for chosen in (other, lang):
            opened.locator(f"#languages button[lang={chosen}]").click()
            assert opened.locator("html").get_attribute("lang") == chosen
            assert opened.locator("#languages [aria-pressed=true]").get_attribute("lang") == chosen
        assert opened.inner_html("h1") == first
        assert opened.locator("input").get_attribute("aria-label") == label
        assert faults(opened) == []
        assert opened.evaluate("localStorage.length + document.cookie.length") == 0
