"""A joined test runs all its cases, and names those that fail."""

import inspect
from contextlib import nullcontext
from pathlib import Path

import cases
import pytest
import torch
from cases import every, refuses_table

from headwise.errors import HeadwiseError


def test_the_loop_over_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "quick", False)
    seen: list[tuple[int, str]] = []

    @every("size", [3, 5, 7])
    @every("kind, even", [("a", True), ("b", False)], ids=["first", "second"])
    def joined(place: str, size: int, kind: str, even: bool) -> None:
        seen.append((size, kind))
        assert place == "here" and (size != 5 or even), f"{size} is odd"

    assert list(inspect.signature(joined).parameters) == ["place"]
    with pytest.raises(AssertionError, match=r"^1 of 3 cases fail: size=5\. .* second: 5 is odd") as failure:
        joined(place="here")
    assert isinstance(failure.value.__cause__, AssertionError)
    assert seen == [(size, kind) for size in (3, 5, 7) for kind in "ab"]

    @every("text", ["1", "x"])
    def joined(text: str) -> None:
        with pytest.raises(ValueError):
            int(text)

    with pytest.raises(AssertionError, match="1 of 2 cases fail: text=1"):
        joined()
    monkeypatch.setattr(cases, "quick", True)
    seen: list[int] = []
    every("size", [3, 5, 7])(lambda size: seen.append(size))()
    assert seen == [3, 7]


@pytest.mark.parametrize("turn", ["first", "second"])
def test_each_test_begins_with_one_thread(turn: str) -> None:
    """With two in each worker, on two cores, every small operation waits: the README ran for 56 s instead of 6."""
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)


def test_a_table_of_refusals_names_what_ends_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(size: int) -> None:
        if size < 0:
            raise HeadwiseError(f"size={size} is negative")

    monkeypatch.setattr(cases, "REFUSED", tmp_path / "refused.toml")
    for words, exact, is_right in (
        ("size=-1 ... negative", False, True),
        ("is negative", False, True),
        ("size=-1 is negative", True, True),
        ("is negative", True, False),
        ("negative ... size", False, False),
    ):
        cases.REFUSED.write_text(f'[sizes]\n"check(-1)" = "{words}"\n')
        with nullcontext() if is_right else pytest.raises(AssertionError, match=r"^check\(-1\): size=-1 is negative"):
            refuses_table("sizes", {"check": check}, exact=exact)
    cases.REFUSED.write_text('[sizes]\n"check(1)" = "negative"\n')
    with pytest.raises(AssertionError, match=r"^check\(1\): it is not refused"):
        refuses_table("sizes", {"check": check})
