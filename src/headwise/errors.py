"""The one family of errors. A message gives the local fact, the numbers on both sides, and what to do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class HeadwiseError(ValueError):
    """Something the caller gave cannot be honoured; the message says what, with the numbers, and the remedy."""


class MissingError(HeadwiseError, KeyError, AttributeError):
    """There is nothing of that name, neither as an item nor as an attribute."""

    __str__ = Exception.__str__  # that of KeyError shows the message in quotes


def refuses_foreign(words: Mapping[str, str]) -> Callable[[FunctionT], FunctionT]:
    """A function that refuses these `words` of other libraries as keywords, and says what each is called here."""

    def around(function: FunctionT) -> FunctionT:
        @functools.wraps(function)
        def checked(*args: Any, **keywords: Any) -> Any:
            foreign = [name for name in keywords if name in words]
            if foreign:
                raise HeadwiseError(
                    "; ".join(f"{name}= is here {words[name]}" for name in foreign)
                )
            return function(*args, **keywords)

        return cast(FunctionT, checked)

    return around


def first_line(error: Exception) -> str:
    """Of its message, or the name of its class where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
