"""`headwise.check`: what is wrong with a learner's attention, by name.

    hw.check(MyAttention)                      # a class, an object or a function; a notebook shows the verdict
    hw.check("attention.py:MyAttention")       # a file, in a process of its own

An exercise calls it with the learner's file and reads the verdict:

    verdict = check(path, causal=True, lang="es")
    verdict.right          # True, False, or None: it could not be checked, and verdict.not_checked says why
    verdict.bugs           # ids of the catalogue: bug_named(verdict.bugs[0]).name("es")
    verdict.findings[0]    # .line, .quote, .evidence, .fix
    print(verdict)         # all of it in words
"""

from __future__ import annotations

import inspect
import signal
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.teach.catalogue import words
from headwise.teach.examine import Options, Target, examine
from headwise.teach.source import Source, kind_of
from headwise.teach.verdict import Verdict

SECONDS = 20.0  # for one check, the import of the file included


class TimeOut(BaseException):
    """The time is over. No Exception, so that code under check does not catch it."""


def check(
    target: Any,
    *,
    causal: bool | None = None,
    args: Mapping[str, Any] | None = None,
    mapping: Mapping[str, str] | None = None,
    lang: str = "en",
    seconds: float = SECONDS,
) -> Verdict:
    """Name the bugs of an attention layer, function, rotation or cache.

    target   a class, an object or a function; or a path, "FILE" or "FILE:NAME", which runs in a process of its own
    causal   ought it to be causal? None guesses from names, signature and buffers; the verdict says how
    args     values for parameters whose names do not tell what they are
    mapping  where weights are: "q", "k", "v", "o", "qkv" -> name of the attribute
    lang     of the words: "en" or "es"
    seconds  at most so long

    HeadwiseError where there is nothing to check: no such file or name, or several candidates. What cannot be built or
    called gives a verdict whose `right` is None.
    """
    options = Options(causal, dict(args or {}), dict(mapping or {}), lang, seconds * 0.3)
    words(lang)
    if isinstance(target, str | Path):
        from headwise.teach.sandbox import check_file

        return check_file(str(target), options, seconds)
    name = getattr(target, "__name__", type(target).__name__)
    source = _source_of(target)
    known = kind_of(source.definitions[name]) if name in source.definitions else None
    kind = known or ("function" if inspect.isfunction(target) else "layer")
    module = sys.modules.get(getattr(target, "__module__", ""), None)
    subject = Target(target, name, source, vars(module) if module else {})
    return judged(subject, kind, options, seconds)


Engine = Callable[[Target, str, Options], Verdict]


def judged(target: Target, kind: str, options: Options, seconds: float, examine_it: Engine | None = None) -> Verdict:
    """The verdict; an error of the learner's code is a verdict too, with its line.

    examine_it  what examines; default: what is made for that kind
    """
    say = words(options.lang)
    try:
        with _clock(seconds), _random_state_kept(), warnings.catch_warnings(action="ignore"):
            return (examine_it or engine(kind))(target, kind, options)
    except TimeOut:
        reason = say["too_long"].format(seconds=seconds)
    except HeadwiseError as error:
        reason = str(error)
    except (Exception, SystemExit) as error:
        reason = explained(error, target.source, say)
    return Verdict(target.name, kind, None, (), tuple(target.checked), (reason, *target.not_checked), options.lang)


def engine(kind: str) -> Engine:
    """What examines a layer, a function, a rotation or a cache."""
    if kind in ("rotary", "cache"):
        from headwise.teach.helpers import examine_helper

        return examine_helper
    return examine


def explained(error: BaseException, source: Source, say: Mapping[str, str]) -> str:
    """An error of the learner's code in one line, with the line of the file in which it arose."""
    calls = traceback.extract_tb(error.__traceback__)
    frames = [f for f in calls if f.filename == source.path]
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, SystemExit):
        text = say["exits"]
    if "CUDA" in text or "cuda" in text or "NVIDIA" in text:
        text = f"{say['gpu']} ({text})"
    if not frames:
        ours = calls and Path(calls[-1].filename).is_relative_to(Path(__file__).parent.parent)
        return f"{say['ours']} ({text})" if ours and not isinstance(error, TypeError | HeadwiseError) else text
    return f"{text} ({say['line']} {frames[-1].lineno}: {(frames[-1].line or '').strip()})"


def _source_of(target: Any) -> Source:
    """The text of the file or cell in which an object is defined, or of the object alone where that is all there is."""
    thing = target if inspect.isclass(target) or inspect.isfunction(target) else type(target)
    try:
        path = inspect.getsourcefile(thing) or ""
        lines, first = inspect.findsource(thing)
        source = Source("".join(lines), path)
        if thing.__name__ in source.definitions:
            return source
        lines, first = inspect.getsourcelines(thing)
        return Source(textwrap.dedent("".join(lines)), path, max(first - 1, 0))
    except (OSError, TypeError, SyntaxError):
        return Source("")


@contextmanager
def _clock(seconds: float) -> Iterator[None]:
    """Raise TimeOut in this block after so long, where the system can: on the main thread of a Unix."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def over(*_: object) -> None:
        raise TimeOut

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """The caller's random numbers go on as if nothing had been drawn."""
    import random

    import numpy as np

    torch = sys.modules.get("torch")
    states = random.getstate(), np.random.get_state(), torch.get_rng_state() if torch else None
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch and states[2] is not None:
            torch.set_rng_state(states[2])
