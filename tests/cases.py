"""Many cases in one test: pytest asks some milliseconds for each item, which thousands of small cases cannot afford."""

import functools
import inspect
import itertools
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headwise.errors import HeadwiseError

quick = False  # conftest sets it for --quick: then the first and the last case must do

Test = Callable[..., None]


def read_table(name: str) -> dict[str, Any]:
    """The TOML file of that name, in whichever folder of the tests."""
    (path,) = Path(__file__).parent.rglob(f"{name}.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def refuses(call: Callable[[], object], match: str) -> None:
    """The call ends with the one error of the package, in these words."""
    with pytest.raises(HeadwiseError, match=match):
        call()


def refused(rows: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The rows of a table of refusals, one for each choice of `{a|b}`: calls, and patterns of the words."""
    for call, words in rows.items():
        parts = re.split(r"\{([^{}|]*\|[^{}]*)\}", call)  # what is chosen from stands at odd places
        texts, options = parts[::2], [part.split("|") for part in parts[1::2]]
        for chosen in itertools.product(*options):
            said = iter(chosen)
            told = re.sub(r"\{\}", lambda _, said=said: next(said), words)  # type: ignore[misc]
            called = "".join(map("".join, zip(texts, [*chosen, ""], strict=True)))
            yield called, ".*".join(map(re.escape, told.split(" ... ")))


def refuses_table(table: str, names: dict[str, Any]) -> None:
    """Every call of a table of refused.toml, whose names are looked up in `names`, is refused with the words beside it.

    It is one line. All calls are made; the failure shows those that end otherwise.
    """
    wrong: list[str] = []
    for call, words in refused(read_table("refused")[table]):
        said = "it is not refused"
        try:
            eval(call, dict(names))  # our own table
        except HeadwiseError as error:
            said = str(error)
        if not re.search(words, said) or "\n" in said:
            wrong.append(f"{call}: {said}")
    assert not wrong, "\n".join(wrong)


def rows(table: str) -> list[Any]:
    """Those of a table of rows.toml."""
    found: list[Any] = read_table("rows")[table]
    return found


def every(names: str, values: Iterable[Any], ids: Iterable[str] | None = None) -> Callable[[Test], Test]:
    """Like `pytest.mark.parametrize`, with a loop over the cases within one item.

    All cases run, whichever fail; the failure names those that did and shows the first. The cases share their fixtures
    and must not skip: pytest would skip those that follow.
    """
    keys = [name.strip() for name in names.split(",")]
    cases = [dict(zip(keys, value if len(keys) > 1 else (value,), strict=True)) for value in values]
    labels = [", ".join(f"{key}={value}" for key, value in case.items()) for case in cases] if ids is None else [*ids]
    named = list(zip(labels, cases, strict=True))

    def join(test: Test) -> Test:
        @functools.wraps(test)
        def joined(**fixtures: Any) -> None:
            failures: list[tuple[str, BaseException]] = []
            for label, case in [named[0], named[-1]] if quick else named:
                try:
                    test(**fixtures, **case)
                except (Exception, pytest.fail.Exception) as error:
                    failures.append((label, error))
            if failures:
                failed = "; ".join(label for label, _ in failures)
                label, first = failures[0]
                raise AssertionError(
                    f"{len(failures)} of {len(named)} cases fail: {failed}. The first, {label}: {first}"
                ) from first

        signature = inspect.signature(test)
        kept = [p for name, p in signature.parameters.items() if name not in keys]
        joined.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return joined

    return join
