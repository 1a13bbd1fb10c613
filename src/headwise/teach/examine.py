"""The check of a layer or a bare attention function: build it, give it numbers, run it, explain what comes out."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headwise.errors import HeadwiseError
from headwise.teach import arguments as size
from headwise.teach.arguments import build
from headwise.teach.caches import cache_bug
from headwise.teach.catalogue import UNKNOWN, bug_named, words
from headwise.teach.encodings import ENCODINGS, meanings_of
from headwise.teach.evidence import evidence_of, stage_of
from headwise.teach.form import Masks, Weights
from headwise.teach.probe import Subject, kind_of_arrays, read_call, to_kind
from headwise.teach.reading import Parts, Reading, arrays_of, parts_of, readings, role_of, styles
from headwise.teach.search import Case, Explanation, Search, close
from headwise.teach.source import Source
from headwise.teach.verdict import Finding, Verdict
from headwise.teach.weights import count_of, renew, same_modules, scale_is_folded

LENGTHS = (7, 4, 6, 3, 5)  # real tokens of the five documents
CAUSAL = r"causal|tril|triu|context_?length|block_?size|autoregress|look_?ahead|no_?peek|subsequent"
CAUSAL_NAME = r"causal|masked|gpt|llama|mistral|decoder|autoregress|qwen|gemma"
# Rotary positions that are used; a parameter `cos` alone may be left aside.
TURNS = (
    r"(rope|rotary|rotat)\w*\(|\bcos\w*\(|\* ?\(?\w*(cos|freqs)|(cos|freqs)\w*(\[[^]]*\])? \*|"
    r"view_as_complex|1j|inv_freq"
)
BEYOND = (
    r"tanh|temperature|logit_scale|normalize\(|alibi|softcap|soft_cap|sink|relative_|conv\d?d|sigmoid|window_size|"
    r"sliding|bucket|layernorm|layer_norm\("
)


OF_HEADS = {"split-no-transpose", "join-no-transpose", "layout-mixed", "heads-averaged", "heads-share-projection"}
OF_WEIGHTS = {"weights-transposed", "output-projection-missing", "bias-dropped", "keys-from-queries"}


@dataclass
class Options:
    """What the caller says. `causal` None guesses; `sizes` are those of --args, `mapping` those of --map."""

    causal: bool | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    mapping: Mapping[str, str] = field(default_factory=dict)
    lang: str = "en"
    seconds: float = 10.0


@dataclass
class Target:
    """What is checked: an object, its name, the source it stands in, and the names of its file."""

    thing: Any
    name: str
    source: Source
    namespace: Mapping[str, Any] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    @property
    def scope(self) -> Source:
        """The text of the object and of what it uses."""
        source = self.source
        nodes = [source.definitions[name] for name in source.reach(self.name)]
        if not nodes:
            return source
        return Source("\n".join("\n".join(source.lines[n.lineno - 1 : n.end_lineno]) for n in nodes))

    def finding(self, bug: str, evidence: str, lang: str) -> Finding:
        """A bug of the catalogue with its likely line."""
        entry = bug_named(bug)
        line, quote = self.source.line_of(entry.lines, self.source.reach(self.name)) or (None, "")
        return Finding(bug, line, quote, evidence, entry.text("fix", lang))


def examine(target: Target, kind: str, options: Options) -> Verdict:
    """The verdict on a layer or a function. HeadwiseError where it cannot be built or called."""
    examiner = Examiner(target, options)
    return examiner.layer() if kind == "layer" else examiner.function()


class Examiner:
    """One check: the object, what is known of it, and what comes out."""

    def __init__(self, target: Target, options: Options) -> None:
        self.target, self.options, self.scope = target, options, target.scope
        self.say = words(options.lang)
        self.rng = np.random.default_rng(0)
        self.gap = 0.0  # between step by step and the whole text
        self.bugs: list[str] = []  # those that a property shows, beside the numbers

    # A layer: weights inside, (B,T,C) in and out.

    def layer(self) -> Verdict:
        thing = self.target.thing
        instance = build(thing, self.options.sizes, self.target.namespace) if isinstance(thing, type) else thing
        if hasattr(instance, "eval") and hasattr(instance, "train"):
            instance.eval()
        return self._with_weights(instance, _method(instance), instance)

    def _with_weights(self, instance: Any, call: Any, module: Any) -> Verdict:
        """The verdict on what has weights, called by `call`."""
        thing, sizes = self.target.thing, self.options.sizes
        folded = scale_is_folded(parts_of(instance, self.options.mapping))
        renew(arrays_of(instance), self.rng)
        parts = replace(parts_of(instance, self.options.mapping), same_head=same_modules(instance))
        width = self._width(parts, instance)
        heads = count_of(instance, ("n_head", "num_head", "heads", "h", "n_h", "n_cabezas"), thing, sizes, size.HEADS)
        groups = count_of(
            instance, ("kv_head", "kv_group", "n_group", "num_group", "key_value_heads"), thing, sizes, None
        )
        choices = list(readings(parts, heads, groups, width))
        if folded:
            choices += [replace(r, settings={**r.settings, "scale": "none"}) for r in choices]
        rotary = self.scope.says(TURNS)
        bases = [10000.0, *[n for n in self.target.source.numbers if 100 <= n < 1e7 and n != 10000.0][:3]]
        choices = [style for r in choices for style in styles(r, rotary, bases)]
        subject = self._subject(module, call)
        longest = count_of(instance, ("context_length", "block_size", "max_len", "max_seq_len"), None, {}, None)
        shape = (size.BATCH, min(size.TOKENS, longest or size.TOKENS), width)
        inputs = self._inputs(subject, shape)
        # A batch, or one document at a time; where both fail, the error of the batch is the one that is shown.
        subject.rank = next((rank for rank in (3, 2) if self._failure(subject, inputs, rank) is None), 3)
        return self._judge(subject, choices, inputs, "layer")

    def _failure(self, subject: Subject, inputs: tuple[Any, ...], rank: int) -> Exception | None:
        """The error of a call with inputs of that many axes, where there is one."""
        subject.rank = rank
        try:
            subject(inputs, self._first_mask(subject, inputs))
        except Exception as error:
            return error
        return None

    def _width(self, parts: Parts, instance: Any) -> int:
        """Width of the input, from the matrix of queries."""
        arrays = parts.weights.get("q") or parts.weights.get("qkv")
        if not arrays:
            raise HeadwiseError(
                f"no weights were found for queries in {self.target.name}; pass --map q=NAME,k=NAME,v=NAME,o=NAME"
            )
        array = arrays[0]
        if array.linear:
            return int(array.value.shape[1])
        shape = array.value.shape
        if size.WIDTH in shape:
            return size.WIDTH
        known = count_of(instance, ("d_model", "embed_dim", "d_in", "n_embd", "hidden_size", "dim"), None, {}, None)
        return known if known is not None and known in shape else int(shape[0] if len(shape) == 2 else max(shape))

    # A bare function: attention(q, k, v, mask=None).

    def function(self) -> Verdict:
        holder = self._weights_as_arguments()
        if holder is not None:
            call = functools.partial(self.target.thing, **{n: x for n, x in vars(holder).items() if n != "n_heads"})
            return self._with_weights(holder, call, None)
        subject = self._subject(None, self.target.thing)
        if len(subject.inputs) != 3:
            raise HeadwiseError(
                f"{self.target.name} has no parameters for queries, keys and values; name them q, k, v, or pass a class"
            )
        verdicts: list[Verdict] = []
        failure: Exception | None = None
        for rank in self._ranks():
            heads = size.HEADS if rank == 4 else 1
            inputs = self._inputs(subject, (size.BATCH, heads, size.TOKENS, size.HEAD_DIM))
            if (error := self._failure(subject, inputs, rank)) is not None:
                failure = failure or error
                continue
            choice = Reading(Weights(heads, heads, dict.fromkeys("qkvo")))
            checked, left = list(self.target.checked), list(self.target.not_checked)
            verdict = self._judge(subject, [choice], inputs, "function")
            if verdict.right:
                return verdict
            verdicts.append(verdict)
            self.target.checked, self.target.not_checked = checked, left
            self.bugs.clear()
        if not verdicts:
            raise HeadwiseError(f"{self.target.name}(q, k, v) fails: {type(failure).__name__}: {failure}")
        return min(verdicts, key=lambda v: (UNKNOWN in v.bugs, len(v.bugs)))

    def _weights_as_arguments(self) -> Any:
        """Matrices and biases for a function that takes them; None where it takes none."""
        names = list(inspect.signature(self.target.thing).parameters)
        # One of these is a dictionary, with the keys that the code uses.
        table = next(
            (n for n in names if re.fullmatch(r"(all_?)?(params?|weights|p|w|theta|pesos|parametros)", n)), None
        )
        keys = [n.value for n in ast.walk(self.scope.tree) if isinstance(n, ast.Constant)] if table else []
        wanted = [s for s in keys if isinstance(s, str)] if table else [n for n in names if re.match(r"w|b", n, re.I)]
        roles = {n: role_of(n) for n in wanted}
        if not {"q", "k", "v"} <= set(roles.values()):
            return None
        kind = kind_of_arrays(None, self.scope.code)
        shapes = {n: (size.WIDTH,) * (1 if n.lower().startswith("b") else 2) for n, role in roles.items() if role}
        arrays = {n: to_kind(self.rng.normal(size=shape), kind) for n, shape in shapes.items()}
        heads = any(re.search(r"head|^h$|cabeza", n, re.I) for n in names)
        return types.SimpleNamespace(**({table: arrays} if table else arrays), n_heads=size.HEADS if heads else 1)

    def _ranks(self) -> list[int]:
        """How many axes an input has: as an unpacked shape says, or the documentation; else all are tried."""
        text = self.scope.text
        unpacked = re.search(r"^\s*([\w]+(?:\s*,\s*\w+)+)\s*=\s*\w+\.(?:shape|size\(\))\s*$", text, re.M)
        written = re.search(
            r"\(([A-Za-z_]+(?:\s*,\s*[A-Za-z_]+){1,3})\)\s*(?:$|[,.;:#-]|array|list|tensor|->)", _docs(text), re.M
        )
        for match in (unpacked, written):
            if match and 2 <= len(names := match[1].split(",")) <= 4:
                return [2, 1] if len(names) == 2 else [len(names)]
        batches = self.scope.says(r"(transpose|swapaxes)\([^)]*-2|\.mt\b")  # the last two axes, of any number
        return [4, 3] if batches else [4, 3, 2, 1]

    # Both.

    def _subject(self, module: Any, call: Any) -> Subject:
        inputs, mask, required, fixed = read_call(call, self.options.sizes)
        if self.options.causal is False:
            fixed = {k: False if "causal" in k.lower() else v for k, v in fixed.items()}
        kind = kind_of_arrays(module, self.target.source.code)
        if module is None:
            kind = kind_of_arrays(None, self.scope.code + " " + str(inspect.signature(call)).lower())
        return Subject(call, kind, inputs, mask, required, 4 if module is None else 3, fixed, module=module)

    def _inputs(self, subject: Subject, shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
        """Queries, keys and values: different as far as the code takes them apart."""
        x, y, z = (self.rng.normal(size=shape) for _ in range(3))
        return {1: (x, x, x), 2: (x, y, y)}.get(len(subject.inputs), (x, y, z))

    def causal(self, subject: Subject) -> bool | None:
        """Ought it to be causal? None where nothing tells."""
        if self.options.causal is not None:
            return self.options.causal
        told = (
            any("causal" in name.lower() for name in subject.fixed)
            or re.search(CAUSAL_NAME, self.target.name, re.I)
            or self.scope.says(CAUSAL)
            or self.scope.tells(r"(?<!not )(?<!non-)(?<!non)(?<!no )(?<!sin )(causal|future)")
        )
        return True if told else None

    def _judge(self, subject: Subject, choices: list[Reading], inputs: tuple[Any, ...], kind: str) -> Verdict:
        causal = self.causal(subject)
        cases = list(self._cases(subject, inputs, bool(causal)))
        if not cases:
            raise HeadwiseError(f"no form of the mask that {self.target.name} requires was taken by it")
        self._properties(subject, cases[0])
        fills = [x for x in self.scope.numbers if x <= 0 or x < 1e-3]
        search = Search(fills, self.options.seconds, self._skipped(choices[0]), "batch-mixed" not in self.bugs)
        explanation = search.explain(choices, cases)
        if causal is None and explanation.unexplained[:1] == (cases[0].name,):
            guess = [replace(case, masks=replace(case.masks, causal=True)) for case in cases]
            other = search.explain(choices, guess)
            if not other.unexplained:
                explanation, cases, causal = other, guess, True
        self.target.checked.append(self.say["causal"] if causal else self.say["not_causal"])
        return self._verdict(kind, explanation, cases, subject)

    def _skipped(self, reading: Reading) -> frozenset[str]:
        """Bugs that cannot be: of a function without weights, of a layer without groups or biases."""
        w = reading.weights
        skip: set[str] = set()
        if w.matrices.get("q") is None:
            skip |= OF_HEADS | OF_WEIGHTS
        if w.n_heads == w.n_kv_heads:
            skip |= {"group-tile", "group-axis"}
        if w.n_heads == 1:
            skip |= OF_HEADS
        if not w.biases:
            skip.add("bias-dropped")
        if w.matrices.get("o") is None:
            skip.add("output-projection-missing")
        if "rope" not in reading.settings:
            skip |= {"rope-mixed-layout", "rope-on-values", "rope-positions"}
        return frozenset(skip)

    def _first_mask(self, subject: Subject, inputs: tuple[Any, ...]) -> Any:
        T, S = inputs[0].shape[-2], inputs[1].shape[-2]
        return np.tril(np.ones((T, S), bool)) if subject.mask_required else None

    def _cases(self, subject: Subject, inputs: tuple[Any, ...], causal: bool) -> Iterator[Case]:
        """Plain; and, where a mask can be passed, a causal one and one for each document."""
        B, T = inputs[0].shape[0], inputs[0].shape[-2]
        inner = causal and not self._mask_is_the_only(subject)
        if not subject.mask_required:
            yield Case("plain", inputs, Masks(inner), {"": subject(inputs)})
            self.target.checked.append(self.say["plain"])
        if subject.mask is None:
            return
        past = np.tril(np.ones((T, T), bool))
        real = np.arange(T)[None] < np.array(LENGTHS)[:B, None]
        padding_only = re.search("pad|key", subject.mask, re.I) is not None
        cases = [] if padding_only else [("mask", past[None, None], Masks(True))]
        each = real[:, None, None] & (past if inner else np.ones((T, T), bool))
        cases.append(("padding", each, Masks(inner, real)))
        for name, allowed, masks in cases:
            outputs = dict(self._masked(subject, inputs, allowed, real if name == "padding" else None))
            if outputs:
                yield Case(name, inputs, masks, outputs)
                self.target.checked.append(self.say[name])
            else:
                self.target.not_checked.append(self.say[f"no_{name}"])

    def _mask_is_the_only(self, subject: Subject) -> bool:
        """Does causality come in through the argument alone?"""
        if subject.mask is None or any("causal" in name.lower() for name in subject.fixed):
            return False
        return not self.scope.says(r"tril|triu|is_causal|arange") and self.options.causal is not True

    def _masked(self, subject: Subject, inputs: tuple[Any, ...], allowed: Any, real: Any) -> Iterator[tuple[str, Any]]:
        """Outputs with a mask, by the form in which it was passed; forms that the code refuses are left out."""
        B, T = inputs[0].shape[0], inputs[0].shape[-2]
        if real is None:
            shapes = {
                "(T,S)": allowed[0, 0],
                "(B,1,T,S)": np.repeat(allowed, B, 0),
                "(B,T,S)": np.repeat(allowed[0], B, 0),
            }
        elif subject.rank < inputs[0].ndim:  # one document at a time
            shapes = {"(T,S)": np.broadcast_to(allowed, (B, 1, T, T)), "(1,S)": real[:, None, None]}
        else:
            shapes = {"(B,1,T,S)": allowed, "(B,T,S)": allowed[:, 0], "(B,1,1,S)": real[:, None, None], "(B,S)": real}
        for meaning in meanings_of(self.scope, self.target.source, str(subject.mask)):
            for shape, mask in shapes.items():
                value = ENCODINGS[meaning](mask)
                try:
                    out = subject(inputs, value)
                except Exception:  # a form of the mask that this code does not take
                    continue
                yield f"{shape} {meaning}", out

    def _properties(self, subject: Subject, case: Case) -> None:
        """Does dropout rest in eval, and fall on weights; do documents meet; does a cache change anything?"""
        mask = self._first_mask(subject, case.inputs)
        base, again = (subject(case.inputs, mask) for _ in range(2))
        drops = self.scope.says(r"drop|bernoulli|binomial|rand")
        if subject.seen.in_eval or (drops and not _same(base, again)):
            self.bugs.append("dropout-in-eval")
        if drops and hasattr(subject.module, "train"):
            subject.module.train()
            try:
                subject(case.inputs, mask)
                self.target.checked.append(self.say["dropout"])
            except Exception:  # only the check of dropout is lost
                self.target.not_checked.append(self.say["no_dropout"])
            subject.module.eval()
            if subject.seen.on_scores:
                self.bugs.append("dropout-on-scores")
        if subject.rank == case.inputs[0].ndim and _same(base, again):
            other = tuple(np.concatenate([self.rng.normal(size=x[:1].shape), x[1:]]) for x in case.inputs)
            other = (other[0],) * 3 if len(subject.inputs) == 1 else other
            if not close(subject(other, mask)[1:], base[1:]):
                self.bugs.append("batch-mixed")
            self.target.checked.append(self.say["batch"])
        if subject.module is not None and len(subject.inputs) == 1 and subject.rank == 3:
            steps = cache_bug(subject, case.inputs[0], base, self.target.namespace, self.scope.code)
            if steps is not None:
                self.target.checked.append(self.say["steps"])
                self.bugs += [steps[0]] if steps[0] else []
                self.gap = steps[1]

    def _verdict(self, kind: str, explanation: Explanation, cases: list[Case], subject: Subject) -> Verdict:
        bugs = list(explanation.bugs)
        if "mask-missing" in bugs and self.scope.says(r"mask\w*(\[[^\]]*, none\]|\.unsqueeze\((-1|2)\))"):
            # A number added to a whole row changes nothing: the mask lies on queries.
            bugs[bugs.index("mask-missing")] = "padding-on-queries"
        if "mask-missing" in bugs and self.scope.says(r"mask.*\de-\d|\de-\d.*mask"):
            bugs[bugs.index("mask-missing")] = "mask-weak-fill"  # so weak that it is lost in rounding
        meeting = {"batch-mixed", "softmax-axis", "mask-head-order"}
        for bug in self.bugs:
            if bug == "dropout-on-scores" and "norm-missing" in bugs:
                continue
            if bug.startswith("cache") and any(re.match("mask|split|join|softmax|group-axis|batch", b) for b in bugs):
                continue  # what mixes tokens differs step by step as well
            if bug == "batch-mixed" and (meeting & set(bugs)):
                continue
            bugs.append(bug)
        if kind == "layer" and self._lacks_output(explanation.reading) and "output-projection-missing" not in bugs:
            bugs.append("output-projection-missing")
        explained = not explanation.unexplained or "batch-mixed" in bugs
        if "dropout-in-eval" in bugs and explanation.unexplained:
            explained = True
            self.target.not_checked.append(self.say["not_still"])
        right: bool | None = not bugs and explained
        if not explained and self.scope.says(BEYOND):
            right = False if bugs else None
            self.target.not_checked.append(self.say["beyond"])
        findings = [self._finding(bug, explanation, cases) for bug in dict.fromkeys(bugs)]
        if not explained and right is False:
            case = next((case for case in cases if case.name in explanation.unexplained), cases[0])
            starts = stage_of(explanation, case, self.say)
            findings.append(Finding(UNKNOWN, None, "", starts, self.say["unknown_fix"]))
        return Verdict(
            self.target.name, kind, right, tuple(findings), tuple(self.target.checked),
            tuple(self.target.not_checked), self.options.lang,
        )  # fmt: skip

    def _lacks_output(self, reading: Reading) -> bool:
        """A class that splits its width into heads and has no W_O; a list of heads, joined, is a form of its own."""
        several = reading.weights.n_heads > 1 and reading.weights.matrices.get("o") is None
        return several and not self.scope.says(r"modulelist|for \w+ in self\.\w*heads?|range\(")

    def _finding(self, bug: str, explanation: Explanation, cases: list[Case]) -> Finding:
        evidence = evidence_of(bug_named(bug), explanation, cases, self.say)
        if bug.startswith("cache"):
            evidence = self.say["by_property_cache-offset"].format(gap=self.gap)
        return self.target.finding(bug, evidence, self.options.lang)


def _same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(a, b, equal_nan=True))


def _docs(text: str) -> str:
    """Comments and documentation strings of a text."""
    return "\n".join(re.findall(r'#.*$|"""(?:.|\n)*?"""', text, re.M))


def _method(instance: Any) -> Any:
    """What is called: `forward` of a module, `__call__`, or a method of a telling name."""
    for name in ("forward", "__call__", "call", "attend", "attention"):
        if name in dir(type(instance)) and callable(getattr(instance, name, None)):
            return getattr(instance, name)
    raise HeadwiseError(f"{type(instance).__name__} cannot be called: it has neither forward nor __call__")
