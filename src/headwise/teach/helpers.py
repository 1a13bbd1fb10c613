"""The check of rotary and cache helpers."""

from __future__ import annotations

from headwise.errors import HeadwiseError
from headwise.teach.examine import Options, Target
from headwise.teach.verdict import Verdict


def examine_helper(target: Target, kind: str, options: Options) -> Verdict:
    """The verdict on a rotation of queries and keys, or on a cache."""
    raise HeadwiseError(f"{target.name} is a {kind} helper; check the layer that uses it")
