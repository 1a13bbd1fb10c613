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

import ast
import builtins
import inspect
import json
import random
import re
import signal
import sys
import textwrap
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from headwise.checker.bugs import (
    Say,
    UncheckedError,
    Verdict,
    in_one_line,
    plainly,
    speaker,
)
from headwise.checker.contract import (
    CALL,
    Config,
    Options,
    Target,
    adapter_of,
    is_config,
    meaning_of,
    value_of,
)
from headwise.checker.examine import examine
from headwise.checker.lent import on_processor
from headwise.checker.loops import CALLED, NAME, head_loop
from headwise.checker.reading import ROLES
from headwise.checker.sandbox import MEMORY, alone, require_torch, run_apart
from headwise.checker.source import (
    MODULES,
    Imports,
    Source,
    attends,
    candidates,
    kind_of,
    names_of,
    passed_over,
    read_text,
    run_definitions,
)
from headwise.errors import HeadwiseError
from headwise.records import record_of
from headwise.table import listed
from headwise.words import unknown

# for one check, the import of the file included: a round choice; with less, fewer bugs are tried
SECONDS = 20.0
# times as long may pass by the clock, on a busy machine: a round choice
WAITING = 4
STARTING = (
    60.0  # that a process may take to import torch on a busy machine: a round choice
)
# Reasons that a function of a few lines, an adapter by hand, does away with.
ADAPTABLE = {
    "needs",
    "no_fit",
    "no_weights",
    "call_fails",
    "returns_shape",
    "asks_parameter",
    "asks_call",
    "no_call",
}
LONGEST = 86_400.0  # a day; clocks of a system end somewhere above


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
    """Name the bugs of an attention layer or function.

    Args:
        target: a class, an object or a function; or a path, "FILE" or "FILE:NAME", which runs in a process of its
            own
        causal: ought it to be causal? None guesses from names, signature and buffers; the verdict says how
        args: values for parameters whose names do not tell what they are
        mapping: where weights are: "q", "k", "v", "o", "qkv" -> name of the attribute
        lang: of the words: "en" or "es"
        seconds: at most so long

    Returns:
        What was found; where the target cannot be built or called, a verdict whose `right` is None. Of a file with
        several attentions the worst verdict, which has the others in `others`.

    Raises:
        HeadwiseError: where there is nothing to check: no such file or name.
    """
    if not 0 < seconds <= LONGEST:
        raise HeadwiseError(
            f"seconds={seconds:g} must be above 0 and at most {LONGEST:g}"
        )
    for role in mapping or {}:
        if role not in ROLES:
            raise unknown(f"no role {role} of weights", role, ROLES)
    for name in args or {}:
        # `causal` says it, and also what the verdict expects
        if CALL["causal"].fullmatch(name):
            raise HeadwiseError(
                f"args has {name}; pass causal=, which also says what is expected"
            )
    # For the search, in seconds of the processor. By the clock `Search` takes at most twice as many, 0.6 of all; the
    # rest is for the import of the file and the calls: a round choice.
    options = Options(
        causal, dict(args or {}), dict(mapping or {}), lang, seconds * 0.3
    )
    speaker(lang)  # an error where there is no such language, before any work
    if isinstance(target, str | Path):
        return _check_file(str(target), options, seconds)
    name = getattr(target, "__name__", type(target).__name__)
    source = _source_of(target)
    kind = kind_of(source.definitions.get(name)) or (
        "function" if inspect.isfunction(target) else "layer"
    )
    module = sys.modules.get(
        getattr(target, "__module__", "")
    )  # whose names the code may use
    return judged(
        Target(target, name, kind, source, options, getattr(module, "__dict__", {})),
        seconds,
    )


def judged(
    target: Target, seconds: float, load: Callable[[], None] = lambda: None
) -> Verdict:
    """The verdict; an error of the learner's code is a verdict too, with its line. `load` puts the object in first."""
    lang = target.options.lang
    try:
        if target.source.is_blank(target.name):
            name = target.name if target.kind == "function" else "forward"
            raise UncheckedError("returns_nothing", name=name)
        # An argument whose name stands nowhere in the text, where there is one, is most likely misspelt.
        for name in target.options.args:
            if target.source.text and not re.search(
                rf"\b{re.escape(name)}\b", target.source.text
            ):
                raise UncheckedError("no_argument", name=name)
        with (
            _clock(seconds),
            _random_state_kept(),
            warnings.catch_warnings(action="ignore"),
        ):
            load()
            verdict = _examined(target)
            around = (target.say("around_loop"),) * (
                target.name == NAME
            )  # once, or not at all
            return replace(
                verdict, not_checked=(*around, *target.lent, *verdict.not_checked)
            )
    except TimeOut:
        reason = target.say("too_long", seconds=seconds)
    except (Exception, SystemExit) as error:
        reason = explained(error, target.source, lang)
        final = UncheckedError | SyntaxError | SystemExit
        is_open = getattr(error, "key", "") in ADAPTABLE or not isinstance(error, final)
        if is_open and target.name != "mine":  # which is one
            reason += "; " + target.say("adapter", lines=adapter_of(target))
    return target.verdict(None, reason=reason)


def _examined(target: Target) -> Verdict:
    """The verdict by what it is; of a function that takes other things than attention does, on its loop over heads."""
    try:
        return examine(target)
    except UncheckedError:
        loop = None
        if target.kind == "function":
            loop = head_loop(target.source.text, target.source.path, target.name)
        if loop is None:
            raise
    target.source = loop
    target.namespace = {**CALLED, **target.namespace}
    run_definitions(loop, NAME, target.namespace)
    target.name, target.thing = NAME, target.namespace[NAME]
    target.__dict__.pop("scope", None)  # it is cached, of what the target was before
    return examine(target)


def explained(error: BaseException, source: Source, lang: str) -> str:
    """An error of the learner's code in one line, with the line of the file in which it arose."""
    say = speaker(lang)
    if isinstance(error, UncheckedError):
        return error.text(lang)
    # of a whole file: a loop is taken out of what could be read
    if isinstance(error, SyntaxError) and error.lineno:
        place = f"{say('line')} {error.lineno}: {(error.text or '').strip()}"
        return f"{plainly(f'{type(error).__name__}: {error.msg}', lang)}. {place}"
    text = say("exits") if isinstance(error, SystemExit) else in_one_line(error)
    if re.search("CUDA|cuda|NVIDIA", text):
        text = f"{say('gpu')} ({text})"
    calls = traceback.extract_tb(error.__traceback__)  # the innermost call last
    for call in reversed(calls):
        if call.filename == source.path:
            line = call.lineno or 1
            quote = "".join(source.lines[line - 1 : line]).strip()
            return f"{text} ({say('line')} {source.number_of(line)}: {quote})"
    ours = calls and Path(calls[-1].filename).is_relative_to(
        Path(__file__).parent.parent
    )
    # A TypeError arises in our line where a call does not suit the learner's signature: that is theirs.
    if ours and not isinstance(error, TypeError | HeadwiseError):
        return f"{say('ours')} ({text})"
    return text


def _source_of(target: Any) -> Source:
    """The text of the file or cell in which an object is defined, or of the object alone where that is all there is."""
    thing = (
        target
        if inspect.isclass(target) or inspect.isfunction(target)
        else type(target)
    )
    try:
        path = inspect.getsourcefile(thing) or ""
        lines, _ = inspect.findsource(thing)  # all lines of the file
        source = Source("".join(lines), path)
        if thing.__name__ in source.definitions:
            return source
        # It is defined within something else: its own lines, which begin at `first` of the file, counted from 1.
        lines, first = inspect.getsourcelines(thing)
        return Source(
            textwrap.dedent("".join(lines)),
            path,
            tuple(range(first, first + len(lines))),
        )
    except (OSError, TypeError, SyntaxError):
        return Source("")


@contextmanager
def _clock(seconds: float) -> Iterator[None]:
    """Raise TimeOut after so long of the processor, where the system can: on the main thread of a Unix."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(
        signal, "SIGALRM"
    ):
        yield
        return

    def over(*_: object) -> None:
        raise TimeOut

    kinds = (signal.SIGALRM, signal.SIGPROF)
    before = {kind: signal.signal(kind, over) for kind in kinds}
    # Code that waits, and takes no time of the processor, ends later.
    signal.setitimer(signal.ITIMER_REAL, WAITING * seconds)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """The caller's random numbers go on as if nothing had been drawn."""
    # not imported for this: where it is not, it has no random numbers to keep
    torch = sys.modules.get("torch")
    states = random.getstate(), np.random.get_state()
    try:
        # (): no graphics card, but the generator of the processor.
        with torch.random.fork_rng(()) if torch else nullcontext():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


# A file, in a process of its own.


def _path_and_name(spec: str, say: Say) -> tuple[Path, str]:
    """The file of FILE or FILE:NAME, and the name, empty where there is none."""
    path = Path(spec)
    name = ""
    if not path.exists() and ":" in spec:  # a file may have a colon in its own name
        text, name = spec.rsplit(":", 1)
        path = Path(text)
    problem = ""
    if not path.exists():
        problem = "no_file"
    elif path.is_dir():
        problem = "is_folder"
    elif path.suffix not in (".py", ".ipynb"):
        problem = "no_python"
    if problem:
        raise HeadwiseError(say(problem, path=path))
    return path.resolve(), name


def read_targets(spec: str, options: Options) -> list[Target]:
    """What is to be checked of FILE or FILE:NAME: what has that name, or every candidate. Nothing of it runs.

    HeadwiseError where there is no such file or name, or no candidate; SyntaxError, ValueError for no Python.
    """
    say = speaker(options.lang)
    path, name = _path_and_name(spec, say)
    source = read_source(read_text(path), str(path), name)
    names = (
        [NAME]
        if source.numbers_of_lines
        else [name]
        if name
        else list(candidates(source))
    )
    if not names:
        raise HeadwiseError(say("no_candidate", file=path.name, name="NAME"))
    targets = []
    for each in names:
        if each not in source.definitions:
            raise unknown(
                say("no_name", path=path, name=each), each, source.definitions
            )
        node = source.definitions[each]
        kind = kind_of(node) or (
            "layer" if isinstance(node, ast.ClassDef) else "function"
        )
        targets.append(Target(None, each, kind, source, options))
    # Where nothing was asked for by name, what was not looked at is said once, with the first target.
    if not (name or source.numbers_of_lines) and (rest := passed_over(source)):
        targets[0].lent.append(
            say("passed_over", names=listed(rest, 6), file=path.name, name=rest[0])
        )
    return targets


def _check_file(spec: str, options: Options, seconds: float) -> Verdict:
    """The verdict on a file, or on what has a name there; of several attentions the worst, with the others."""
    say = speaker(options.lang)
    try:
        targets = read_targets(spec, options)
    except HeadwiseError:  # which is a ValueError, too
        raise
    except (SyntaxError, ValueError) as error:
        path, name = _path_and_name(spec, say)
        target = Target(None, name or path.name, "", Source("", str(path)), options)
        return target.verdict(
            None, reason=explained(error, target.source, options.lang)
        )
    require_torch(spec, targets[0].source.code)
    verdicts = [_check_apart(target, seconds) for target in targets]
    ran = any(verdict.right is not None for verdict in verdicts)
    if not _path_and_name(spec, say)[1] and not ran:
        # what cannot be built may use parts that can.
        verdicts += [_check_apart(part, seconds) for part in _parts_of(targets)]
    # Wrong, then right, then what could not be told, of which what did run comes first.
    order = {False: 0, True: 1, None: 2}
    first, *others = sorted(
        verdicts, key=lambda verdict: (order[verdict.right], not verdict.checked)
    )
    if first.right is None and not any(map(attends, targets[0].source.tree.body)):
        reasons = *first.not_checked, say("no_attention")
        first = replace(first, not_checked=reasons)
    return replace(first, others=tuple(others))


def _parts_of(targets: list[Target]) -> Iterator[Target]:
    """What attends of that which the targets use."""
    names = {target.name for target in targets}
    for target in targets:
        for name in target.source.reach(target.name)[1:]:
            node = target.source.definitions[name]
            if (kind := kind_of(node)) and attends(node) and name not in names:
                names.add(name)
                yield replace(target, name=name, kind=kind, lent=[])


def _check_apart(target: Target, seconds: float) -> Verdict:
    """The verdict on something of a file, from a process of its own."""
    say = target.say
    # The process counts its seconds from where its imports are done, and ends itself; this is for one that cannot.
    ended = run_apart(
        "headwise.checker.verdict",
        {**request_of(target), "seconds": seconds},
        WAITING * seconds + STARTING,
    )
    if ended.answer:
        fields = {**json.loads(ended.answer), "others": ()}
        verdict: Verdict = record_of(Verdict, fields)
        return replace(verdict, not_checked=(*target.lent, *verdict.not_checked))
    reason = f"{say('exits')} ({ended.code})"
    if ended.code is None or ended.trace:
        reason = say("too_long", seconds=seconds)
        # The line of the learner's file in which the time ended, as faulthandler wrote it.
        match = re.search(
            rf'File "{re.escape(target.source.path)}", line (\d+)', ended.trace
        )
        if match:
            reason += f" ({say('line')} {target.source.number_of(int(match[1]))})"
    elif ended.code in (
        -signal.SIGKILL,
        -signal.SIGXCPU,
    ):  # by the system, beyond a limit
        reason = say("killed", memory=MEMORY >> 30)
    return target.verdict(None, reason=reason)


def read_source(text: str, path: str = "", name: str = "") -> Source:
    """The text of a file as it is; or its loop over heads as a function, where it has nothing else to check.

    name  what is asked for in it; empty where nothing is
    """
    source = Source(text, path)
    try:
        # A name that the file does not have is known, too: it is refused later, with the nearest names.
        node = source.definitions.get(name)
        is_known = kind_of(node) if node else name or candidates(source)
    except SyntaxError:  # as of a page that was printed without its indentation
        loop = head_loop(text, path, name)
        if loop is None:
            raise
        return loop
    return source if is_known else head_loop(text, path, name) or source


def request_of(target: Target) -> dict[str, Any]:
    """What a process of its own is told of something in a file; `read_request` reads it there."""
    source = target.source
    options = target.options
    # As Python writes them, for JSON would make lists of tuples.
    args = repr(dict(options.args))
    try:
        ast.literal_eval(args)
    except (ValueError, SyntaxError):
        raise HeadwiseError(target.say("no_literal", args=args)) from None
    return {
        "path": source.path,
        "name": target.name,
        "kind": target.kind,
        "args": args,
        "text": source.text,
        "numbers": source.numbers_of_lines,
        "options": asdict(replace(options, args={})),
    }


def _known_elsewhere(source: Source, options: Options) -> dict[str, Any]:
    """What imports of files that are not here bring: sizes, by what their names mean, and configs; modules of all."""
    imported = [n for n in ast.walk(source.tree) if isinstance(n, ast.ImportFrom)]
    words = {each.name for node in imported for each in node.names}
    brings_all = "*" in words
    if brings_all:
        words |= {*names_of([source.tree], ast.Load)} - vars(builtins).keys()
    known: dict[str, Any] = {}
    for word in words - {"*", *MODULES}:
        value = value_of(word, options.args)
        is_size = type(value) in (int, float) and meaning_of(word) is not True
        is_module = source.says(rf"\b{word.lower()}\.")
        if is_config(word):
            known[word] = Config(options.args, code=source.code)
        elif is_size and not is_module and (word.isupper() or brings_all):
            known[word] = value
        elif is_module and brings_all:
            known[word] = Imports(Path(source.path), {})(word)
    return known


def read_request(request: Mapping[str, Any]) -> tuple[Target, Callable[[], None]]:
    """What is to be checked, and a function that runs its file and puts the object in."""
    path = request["path"]
    source = Source(request["text"], path, tuple(request["numbers"]))
    options = replace(
        Options(**request["options"]), args=ast.literal_eval(request["args"])
    )
    target = Target(None, request["name"], request["kind"], source, options)

    def load() -> None:
        # As when Python runs the file: what lies beside it can be imported, and it is a module (`learner`).
        sys.path.insert(0, str(Path(path).parent))
        module = sys.modules["learner"] = types.ModuleType("learner")
        module.__file__ = path
        target.namespace = vars(module)
        is_loop = bool(source.numbers_of_lines)
        target.namespace.update(CALLED if is_loop else {})
        known = _known_elsewhere(source, options)
        target.namespace.update(known)
        if torch := sys.modules.get(
            "torch"
        ):  # there is no graphics card, and none is needed
            torch.Tensor.cuda = torch.nn.Module.cuda = lambda x, *_, **__: x
            if source.says("cuda"):
                on_processor(torch)
        lent = run_definitions(source, target.name, target.namespace, known)
        if lent and not is_loop:
            target.lent.append(
                target.say("unimported", names=", ".join(dict.fromkeys(lent)))
            )
        target.thing = target.namespace[target.name]

    return target, load


def main() -> None:
    """In the process of its own: load the file and check it."""
    import faulthandler

    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    trace = Path(request["trace"]).open("w")  # noqa: SIM115  # faulthandler writes into it until the end
    target, load = read_request(request)

    def work() -> dict[str, Any]:
        # First the check stops itself; where the learner's code does not let it, a second later the process ends.
        late = WAITING * request["seconds"] + 1
        faulthandler.dump_traceback_later(late, exit=True, file=trace)
        return asdict(judged(target, request["seconds"], load))

    alone(request, target.source.text, work)


if __name__ == "__main__":
    main()
