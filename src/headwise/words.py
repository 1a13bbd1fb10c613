"""What pages say, by key, in every language: the phrases of `words.toml`.

Python sends keys and facts; pages put them into words. A phrase may hold values, `{count}`, and words
that go by a number, `{count} {count:head|heads}`: the first where it is 1. On a page `*word*` stands out, `` `key` ``
is a key of the keyboard and `k_j` has an index. Values are never read so.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from headwise.errors import HeadwiseError
from headwise.files import read_toml

LANGUAGES = ("en", "es")
NAMED = ("column", "role", "fact")  # sections of names
Facts = dict[str, Any]  # values by their names: of a phrase, of a JSON object
# {name} is group 1; of {name:one|many} groups 2 and 3 are the two words.
_PLACE = r"\{(\w+)(?::([^|{}]*)\|([^|{}]*))?\}"


@functools.cache
def table() -> dict[str, dict[str, str]]:
    """{key: {language: phrase}}; the key of `[report] lede` is `report.lede`."""
    texts = {}
    for name, section in read_toml("words.toml").items():
        for key, phrase in section.items():
            if isinstance(phrase, list):
                texts[f"{name}.{key}"] = dict(zip(LANGUAGES, phrase, strict=True))
            elif name in NAMED:  # the key is the English text
                texts[f"{name}.{key}"] = {"en": key.replace("_", " "), "es": phrase}
            elif name == "meaning":  # statistics bring their English with them
                texts[f"{name}.{key}"] = {"es": phrase}
            else:
                texts[f"{name}.{key}"] = dict.fromkeys(LANGUAGES, phrase)
    return texts


def check_lang(lang: str) -> None:
    """Raise HeadwiseError for a language that the table does not have."""
    if lang not in LANGUAGES:
        raise HeadwiseError(
            f"lang={lang!r} is not known; one of {', '.join(LANGUAGES)}"
        )


def phrases(sections: Sequence[str]) -> dict[str, dict[str, str]]:
    """{language: {key: phrase}} of some sections: what a page carries."""
    kept = {
        key: texts for key, texts in table().items() if key.split(".")[0] in sections
    }
    return {
        lang: {key: texts[lang] for key, texts in kept.items() if lang in texts}
        for lang in LANGUAGES
    }


def phrase(key: str, lang: str = "en", /, **facts: Any) -> str:
    """A phrase with its facts, as plain text with its marks of emphasis; notes among the facts are said, too."""
    return marked(key, lang, facts)


def marked(
    key: str, lang: str, facts: Facts, marks: tuple[str, str] = ("*", "*")
) -> str:
    """A phrase with its facts; what it emphasises stands between the two `marks`."""
    # Marks first: a star in a value is no mark.
    text = re.sub(r"\*([^*]+)\*", rf"{marks[0]}\1{marks[1]}", table()[key][lang])
    values = {name: said(fact, lang) for name, fact in facts.items()}
    return re.sub(_PLACE, lambda place: _value(place, values), text)


def key_of(section: str, name: str) -> str:
    """The key of something by its name: `role.previous_token`."""
    return f"{section}.{name.replace(' ', '_')}"


class Note(str):
    """A phrase in English that remembers its key and its facts: `Note.of("note.silent", heads="L0.H1")`."""

    key: str
    facts: Facts

    @classmethod
    def of(cls, key: str, **facts: Any) -> Note:
        note = cls(phrase(key, **facts))
        note.key = key
        note.facts = facts
        return note


def sent(text: str) -> str | tuple[str, Facts]:
    """What a page gets of a text: a note as key and facts, which it says in its language; any other as it is."""
    return (text.key, text.facts) if isinstance(text, Note) else text


def unknown(
    what: str, name: object, known: Iterable[str], offer: str | None = None
) -> HeadwiseError:
    """What to raise for a name that is not among the known ones: it offers the nearest, or else all of them.

    what   what the message begins with, such as "no preset 'lama'"; `name` alone is compared with the known names
    offer  what to say when nothing is near; default: a list of the known names
    """
    names = list(known)
    # the two nearest, of those that are alike enough
    near = difflib.get_close_matches(str(name), names, n=2)
    # difflib takes capitals for other letters, so that "LLAMA" is not near "llama"
    if not near:
        near = [other for other in names if other.lower() == str(name).lower()]
    if near:
        return HeadwiseError(f"{what}; did you mean {' or '.join(near)}?")
    return HeadwiseError(f"{what}; {offer or 'there are ' + ', '.join(names)}")


def system_language() -> str:
    """The language of this system's messages, where the table has it, else en: LC_ALL, else LC_MESSAGES, else LANG."""
    # The first that is set and not empty, such as "es_ES.UTF-8".
    locale = next(
        filter(None, map(os.environ.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), ""
    )
    return locale[:2] if locale[:2] in LANGUAGES else LANGUAGES[0]


def said(text: Any, lang: str) -> Any:
    """A note in a language, and the notes among its facts; anything else as it is."""
    return phrase(text.key, lang, **text.facts) if isinstance(text, Note) else text


def labelled(section: str, label: str) -> str:
    """A label as the note of `section` that bears its name; as it is where there is none."""
    key = key_of(section, label)
    return Note.of(key) if key in table() else label


def _value(place: re.Match[str], values: Facts) -> str:
    """A value as text; of `{count:head|heads}` the word that goes with it."""
    value = values[place[1]]
    singular = place[2]
    plural = place[3]
    if singular is None:
        return str(value)
    # a number may come as text, already formatted
    return singular if value in (1, "1") else plural
