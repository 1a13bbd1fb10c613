"""Which language is spoken, and what the library said in English, said in Spanish."""

from __future__ import annotations

import pytest

from headwise.words import known, phrase, spoken, system_language, table


@pytest.mark.parametrize(
    ("settings", "lang"),
    [
        ({"LANG": "es_ES.UTF-8"}, "es"),
        ({"LANG": "es_AR", "LC_ALL": "C.UTF-8"}, "en"),
        ({"LC_MESSAGES": "es_MX.UTF-8", "LANG": "en_US.UTF-8"}, "es"),
        ({"LANG": "de_DE.UTF-8"}, "en"),
        ({"LANG": ""}, "en"),
        ({}, "en"),
    ],
)
def test_the_language_of_the_system(settings: dict[str, str], lang: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert system_language() == lang


def test_phrases_are_found_in_both_languages() -> None:
    line = "training preset verbs, 129,984 parameters, on the verb corpus, into runs/verbs"
    spanish = "entrenando la receta verbs, 129,984 parámetros, con el corpus de verbos, en runs/verbs"
    assert spoken(line, "es") == spanish and spoken(line, "en") == line
    line = "the baseline    2.478, best n-gram, order 2 (Kneser-Ney): the model is 2.358 better"
    spanish = "la referencia 2.478, el mejor n-grama, orden 2 (Kneser-Ney): el modelo es 2.358 mejor"
    assert " ".join(spoken(line, "es").split()) == spanish
    assert spoken("a line that nobody put into words", "es") == "a line that nobody put into words"
    assert known("my book.txt") is None
    for key in table():
        if key.startswith("said."):
            places = [part.split("}")[0] for part in table()[key]["en"].split("{")[1:]]
            note = known(phrase(key, "en", **{place: f"<{place}>" for place in places}))
            assert note is not None and note.key == key, key
            assert note.facts == {place: f"<{place}>" for place in places}, key
