"""The one family of errors. A message gives the local fact, the numbers on both sides, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HeadwiseError(ValueError):
    """Something the caller gave cannot be honoured; the message says what, with the numbers, and the remedy."""


class MissingError(HeadwiseError, KeyError, AttributeError):
    """There is nothing of that name, neither as an item nor as an attribute."""

    __str__ = Exception.__str__  # that of KeyError shows the message in quotes


def unknown(what: str, name: object, known: Iterable[str], offer: str | None = None) -> HeadwiseError:
    """What to raise for a name that is not among the known ones: it offers the nearest, or else all of them.

    what   the whole of the local fact, such as "no preset 'lama'"; `name` is compared with the known names
    offer  what to say when nothing is near; default: a list of the known names
    """
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=2) or [
        known for known in names if known.lower() == str(name).lower()
    ]
    hint = f"did you mean {' or '.join(near)}?" if near else offer or f"there are {', '.join(names)}"
    return HeadwiseError(f"{what}; {hint}")
