"""The report as text, and how pages are put together: all is escaped, nothing is loaded, words in two languages."""

import base64
import copy
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import Opener, faults
from cases import refuses
from surveys import SUMMARY, maps_of, survey_of, survey_of_maps

import headwise as hw
from headwise.corpus import verbs
from headwise.records import HeadMap, HeadMaps, RunSummary
from headwise.table import escaped
from headwise.view.page import json_block, page, word
from headwise.view.report import report_html, survey_data, write_report
from headwise.words import LANGUAGES, Note, phrase, table

HOSTILE = (
    "<script>alert(1)</script>", "</script>", "-->", "<!--", "&amp;", "\"'", "\u2028", "עברית", "🙂", "$model ${data}",
    "\ud800",
)  # fmt: skip


class Page(HTMLParser):
    """The elements with their attributes, and the text of every script and style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside in self.raw:
            self.raw[self.inside].append(data)

    @property
    def data(self) -> Any:
        return json.loads(self.raw["script"][0])


def page_of(maps: HeadMaps, summary: RunSummary | None = None) -> str:
    return report_html(survey_of_maps(maps), maps, summary)


def levels(packed: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed), dtype="<u2") / 65535


def unpacked(packed: str, length: int, causal: bool) -> np.ndarray:
    full = np.zeros((length, length))
    full[np.tri(length, dtype=bool) if causal else np.ones((length, length), dtype=bool)] = levels(packed)
    return full


@pytest.mark.parametrize("causal", [True, False])
def test_the_numbers_survive_to_half_a_step(causal: bool) -> None:
    maps = maps_of(13, 1, causal=causal)
    data = Page(page_of(maps)).data["maps"]
    assert data["causal"] is causal
    assert list(data["weights"]) == [head.name for head in maps.maps]
    for head in maps.maps:
        assert np.abs(unpacked(data["weights"][head.name], 13, causal) - head.weights).max() <= 0.5 / 65535 + 1e-9


def test_weights_at_the_edge() -> None:
    maps = maps_of(5, 1)
    ahead = HeadMap(1, 0, np.full((5, 5), 0.2, dtype=np.float32))
    assert Page(page_of(replace(maps, maps=(*maps.maps, ahead)))).data["maps"]["causal"] is False
    maps = HeadMaps("toy", ("a",), (HeadMap(0, 0, np.array([[1.0000002]], dtype=np.float32)),))
    assert unpacked(Page(page_of(maps)).data["maps"]["weights"]["L0.H0"], 1, True)[0, 0] == 1.0


def test_hostile_text_makes_no_element() -> None:
    tame = Page(page_of(maps_of(11, 1), replace(SUMMARY, facts={"a": "b", "c": "d"}, samples=("x", "y"))))
    maps = replace(maps_of(11, 1, tokens=HOSTILE), model="</title><script>alert(4)</script>")
    hostile = Page(page_of(maps, SUMMARY))
    # Tokens, the model's name, the facts and the samples bring nothing: the script puts them in as text.
    tags = [tag for tag, _ in hostile.elements]
    assert tags.count("script") == [tag for tag, _ in tame.elements].count("script") == 4
    assert sorted(tags) == sorted(tag for tag, _ in tame.elements)
    assert hostile.data["tokens"] == hostile.data["maps"]["tokens"]
    assert hostile.data["tokens"] == [*HOSTILE[:6], "<U+2028>", "עברית", "🙂", "$model␣${data}", "<U+D800>"]
    assert not any("alert(" in script for script in hostile.raw["script"][1:])
    block = page_of(maps).split('id="data">')[1].split("</script>")[0]
    assert not set(block) & set("<>&\u2028") and block.isascii()


def test_the_file_is_a_page_of_its_own(tmp_path: Path) -> None:
    page = Page(page_of(maps_of(7, 1), SUMMARY))
    for tag, attributes in page.elements:
        for name in ("src", "srcset", "href", "action", "data", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith("data:"), (tag, name, value)
        assert not any(name.startswith("on") or name == "style" for name in attributes), (tag, attributes)
    for text in page.raw["style"] + page.raw["script"][1:]:
        text = text.replace("'http://www.w3.org/2000/svg'", "")  # the name of a kind of element, which nothing loads
        assert not re.search(r"https?:|url\(|@import|import\s*\(|fetch\(|XMLHttp|WebSocket|sendBeacon", text)
    page = Page(page_of(maps_of(7, 1)))
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none';") and "unsafe" not in policy
    for text in (page.raw["style"][0], page.raw["script"][3]):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
    write_report(tmp_path / "report.html", survey_of_maps(maps_of(7, 1)), maps_of(7, 1), SUMMARY)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page_of(maps_of(7, 1), SUMMARY)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_numbers_of_the_survey_survive() -> None:
    survey = survey_of(2, 3, tokens=211, passage=37, k=5)
    data = Page(report_html(survey)).data
    keys = ["ablation", "importance", *survey.statistics]  # what tells most stands first
    for profile, stored in zip(survey.profiles, data["heads"], strict=True):
        entropy = profile.scores["entropy"]
        bounds = [entropy.mean, entropy.low, entropy.high, 7]
        assert stored["values"][keys.index("entropy")] == pytest.approx(bounds, rel=1e-5)
        assert stored["values"][keys.index("importance")][0] == pytest.approx(profile.importance, rel=1e-5)
        assert np.abs(levels(stored["shares"]).reshape(32, 32) - profile.shares).max() <= 0.51 / 65535
        assert np.abs(levels(stored["first"]) - profile.first_key).max() <= 0.51 / 65535
        assert np.abs(levels(stored["weights"]).reshape(37, 5) - profile.top_weights).max() <= 0.51 / 65535
        received = levels(stored["received"]) * stored["largest"]
        np.testing.assert_allclose(received, profile.received, atol=stored["largest"] / 65535)
        numbers = np.frombuffer(base64.b64decode(stored["keys"]), dtype="<u2")
        assert (numbers.reshape(37, 5) == profile.top_keys).all()


@pytest.mark.slow
def test_a_survey_of_144_heads_stays_under_5_mb_whatever_the_length_of_the_text() -> None:
    sizes = []
    for tokens in (128, 1024):
        survey = survey_of(12, 12, tokens=tokens, passage=128, k=8)
        survey = replace(survey, longest=1000 * tokens, n_tokens=9000 * tokens)
        sizes.append(len(report_html(survey).encode()))
    assert max(sizes) < 2e6
    assert sizes[1] - sizes[0] < 60_000  # the tokens that are shown, no more


PACKAGE = Path(hw.__file__).parent
PLACE = re.compile(r"\{(\w+)(:[^{}]*)?\}")
MARKUP = '</script><img src=x onerror=alert(1)> *b* {n} `k` q_d " data-word="page.made_by'


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
    body = f'<main>{word("page.test", "h1", n=2, x=MARKUP)}<input data-word-aria-label="page.language"></main>'
    for lang, other in (("en", "es"), ("es", "en")):
        path = tmp_path / f"{lang}.html"
        html = page("test", body, title=("page.named", {"n": 2, "x": MARKUP}), lang=lang)
        path.write_text(html, encoding="utf-8")
        title = re.search("<title [^>]*>(.*)</title>", html)[1]
        opened = open_page(path)
        assert escaped(opened.title()) == title and title.startswith("2 heads" if lang == "en" else "2 cabezas")
        first = opened.inner_html("h1")
        assert opened.locator("html").get_attribute("lang") == lang
        assert opened.inner_text("h1").startswith("2 heads" if lang == "en" else "2 cabezas")
        assert opened.inner_text("h1").endswith(MARKUP) and opened.locator("img").count() == 0
        label = opened.locator("input").get_attribute("aria-label")
        for chosen in (other, lang):
            opened.locator(f"#languages button[lang={chosen}]").click()
            assert opened.locator("html").get_attribute("lang") == chosen
            assert opened.locator("#languages [aria-pressed=true]").get_attribute("lang") == chosen
        assert opened.inner_html("h1") == first
        assert opened.locator("input").get_attribute("aria-label") == label
        assert faults(opened) == []
        assert opened.evaluate("localStorage.length + document.cookie.length") == 0
