"""A joined test runs all its cases, and names those that fail."""

import inspect

import cases
import pytest
from cases import every


def test_the_loop_over_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "quick", False)
    seen: list[tuple[int, str]] = []

    @every("size", [3, 5, 7])
    @every("kind, even", [("a", True), ("b", False)], ids=["first", "second"])
    def joined(place: str, size: int, kind: str, even: bool) -> None:
        seen.append((size, kind))
        assert place == "here" and (size != 5 or even), f"{size} is odd"

    assert list(inspect.signature(joined).parameters) == ["place"]
    with pytest.raises(AssertionError, match=r"^1 of 3 cases fail: size=5\. .* second: 5 is odd"):
        joined(place="here")
    assert seen == [(size, kind) for size in (3, 5, 7) for kind in "ab"]
