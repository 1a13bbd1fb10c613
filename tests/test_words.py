"""Which language is spoken, and what the library says by key."""

import pytest
from cases import rows

from headwise.words import Note, said, system_language


@pytest.mark.parametrize(("settings", "lang"), rows("languages_of_systems"))
def test_the_language_of_the_system(settings: dict[str, str], lang: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert system_language() == lang


def test_a_note_is_said_in_a_language_with_the_notes_among_its_facts() -> None:
    line = Note.of("sentence.relation", looks="él", at="write", weight="0.97", role=Note.of("role.person"), mean="0.90")
    assert line == "At *él* it looks at *write* (0.97; person, 0.90 on average)." == said(line, "en")
    assert said(line, "es") == "En *él* mira a *write* (0.97; persona, 0.90 en promedio)."
    assert said("a line that nobody put into words", "es") == "a line that nobody put into words"
