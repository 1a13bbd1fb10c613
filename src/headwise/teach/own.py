"""The learner's own class in a GPT: it learns the verbs in place of our layer, and ours then reads what it learned.

The class goes into every block, and its forward and backward do all of the training. It is built and called as
`headwise.check` does it, in the sizes of the GPT. Afterwards its weights are carried into a layer of ours, as the check
reads them; the logits of both models are compared on held-out text, and so are the maps of all heads, those of the
learner's class as `hw.watch` reads them where they arise. So a run folder is written like any other: every command
reads it, and the heads in its report are the learner's. All of it happens in a process of its own, under the guard of
`sandbox`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.files import require_empty, write_whole
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.run import FILES, Run, Settings, read_run, run_training
from headwise.gpt.train import Progress
from headwise.heads.blocks import row_weights
from headwise.models.hook import attach
from headwise.models.sites import sites_of
from headwise.records import Call, from_json
from headwise.rungs.cache import KVCache
from headwise.teach.bugs import Settings as Sizes
from headwise.teach.bugs import UncheckedError
from headwise.teach.check import explained, read_request, request_of
from headwise.teach.form import CORRECT, Masks, compute, output, project
from headwise.teach.reading import Reading, arrays_of, parts_of, readings, renew
from headwise.teach.sandbox import alone, run_apart
from headwise.teach.search import close
from headwise.teach.source import ENCODINGS, MASK, meanings_of
from headwise.teach.subject import Target, arguments_of, build, meaning_of, subject_of, to_kind

LARGEST_DIFFERENCE = 1e-3  # of logits, which are of the order of 10: float32, two layers, sums in another order
# How wide a class with sizes of its own may be: twice the 64 of the preset, a round choice. A wider one takes
# longer to train.
WIDEST = 128
SHAPE = {"bias": True}  # of the preset `course`: a course's class has a bias in its last projection
TELLING = "sees_later", "adds_input", "too_wide", "returns_shape", "no_such_layer"  # reasons, the most telling first
MaskForm = tuple[str, int]  # how a causal mask is written for a call, and with how many axes
# Axes of a mask, (T,S), (B,1,T,S) or (B,T,S), as code takes it. They are tried in this order until one fits.
AXES = (2, 4, 3)


class LearnerAttention(nn.Module):
    """A module of the learner where a GPT has its attention, called with what its parameters ask for.

    Of what the module gives back the first tensor of the shape (B,T,C) counts.

    mask  how a causal mask is written for it, and with how many axes; None where it is causal by itself
    """

    def __init__(self, target: Target, module: Any, mask: MaskForm | None = None) -> None:
        super().__init__()
        subject = subject_of(target, module.forward, module)
        self.module, self.mask = module, mask
        self.inputs, self.fixed, self.mask_name = subject.inputs, subject.fixed, subject.mask or ""

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        # A block of the GPT passes a cache on. It is None here: texts are written by the model with layers of ours.
        B, T, _ = x.shape
        arguments = dict.fromkeys(self.inputs, x) | {name: _cut(value, T) for name, value in self.fixed.items()}
        if self.mask:
            meaning, axes = self.mask
            mask: Tensor = to_kind(ENCODINGS[meaning](np.tril(np.ones((T, T), bool))), "torch")
            lead = {2: (), 3: (B,), 4: (B, 1)}[axes]
            arguments[self.mask_name] = mask.expand(*lead, T, T)
        result = self.module(**arguments)
        # An empty tuple counts as one part: no shape, so that the error names its type.
        parts = result if isinstance(result, tuple | list) and result else [result]
        for part in parts:
            if isinstance(part, Tensor) and part.shape == x.shape:
                return part
        shape = tuple(getattr(parts[0], "shape", ())) or type(parts[0]).__name__
        raise UncheckedError("returns_shape", shape=shape, input=tuple(x.shape))


def _cut(value: Any, n_tokens: int) -> Any:
    """Of a table of positions (context,d), or of a pair, the rows of the tokens of a text; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(_cut(part, n_tokens) for part in value)
    return value[:n_tokens] if isinstance(value, Tensor) and value.ndim == 2 else value


@dataclass(frozen=True)
class Learner:
    """A class that can stand in a GPT: how it is built and called, and the shape of the GPT."""

    target: Target
    sizes: Sizes
    theirs: bool  # are its own defaults kept?
    mask: MaskForm | None
    config: GPTConfig

    def attention(self) -> LearnerAttention:
        """A new one, with first weights as a GPT draws them: what a class draws may be much too large."""
        layer = LearnerAttention(self.target, build(self.target, self.sizes, self.theirs), self.mask)
        parts = parts_of(layer.module, self.target.options.mapping)
        last = math.sqrt(2 * self.config.n_layers)  # as in GPT-2: so many outputs are added up in the stream
        for role, arrays in parts.weights.items():
            for array in arrays:
                nn.init.normal_(array.holder, std=self.config.init_std / (last if role == "o" else 1))
        for arrays in parts.biases.values():
            for array in arrays:
                nn.init.zeros_(array.holder)
        return layer

    def model(self, config: GPTConfig) -> GPT:
        """A GPT with a layer of this class in each block."""
        model = GPT(config)
        for block in model.blocks:
            block.attention = self.attention()
        return model


def fitted(target: Target, config: GPTConfig) -> Learner:
    """How a class stands in a GPT of that shape, or of its own where it has sizes of its own.

    UncheckedError where it cannot: it sees later tokens, does not run, or computes what no layer of ours does.
    """
    if not (isinstance(target.thing, type) and issubclass(target.thing, nn.Module)):
        raise UncheckedError("no_module", name=target.name)
    failures = []
    for sizes, theirs in _attempts(target, config):
        target.options = replace(target.options, args=sizes)  # where `readings` looks for sizes, too
        for mask in _masks(target):
            try:
                return _fitted(target, sizes, theirs, mask, config)
            except Exception as error:  # whatever the learner's code raises; the next way may be the right one
                failures.append(error)
    # No way is right: the reason that tells most is given, or else that of the first way.
    for key in TELLING:
        for failure in failures:
            if getattr(failure, "key", "") == key:
                raise failure
    raise failures[0]


def _fitted(target: Target, sizes: Sizes, theirs: bool, mask: MaskForm | None, config: GPTConfig) -> Learner:
    """The class built and called in one way, where the correct form gives what it gives."""
    layer = LearnerAttention(target, build(target, sizes, theirs).eval(), mask)
    renew(arrays_of(layer.module), np.random.default_rng(0))  # a bias of 0 would not tell how it is used
    reading = reading_of(layer, target, config.context)
    weights, settings = reading.weights, {**CORRECT, **reading.settings}
    width, joined = weights.matrices["q"].shape  # (C,h*d)
    head_dim, rope = joined // weights.n_heads, settings["rope"]  # None or (turn, table, base): see `rotate`
    if settings["residual"]:
        raise UncheckedError("adds_input", name=target.name)
    if width > WIDEST:
        raise UncheckedError("too_wide", name=target.name, width=width, most=WIDEST)
    # A layer of ours has values as wide as keys, RMSNorm on queries and keys alike, and rotates whole heads.
    if (
        weights.matrices["v"].shape[1] != weights.n_kv_heads * head_dim
        or settings["qk_norm"] == "layer"
        or len(weights.gains) == 1  # a norm on queries alone, or on keys alone
        or settings["rope_part"] != 1
    ):
        raise UncheckedError("no_such_layer", name=target.name)
    # None is the default: as many key/value heads as heads, and heads that share the width out evenly.
    config = replace(
        config,
        d_model=width,
        n_heads=weights.n_heads,
        n_kv_heads=None if weights.n_kv_heads == weights.n_heads else weights.n_kv_heads,
        head_dim=None if joined == width else head_dim,
        qk_norm=settings["qk_norm"] is not None,
        position="rope" if rope else config.position,
        rope_theta=rope[2] if rope else config.rope_theta,
    )
    return Learner(target, sizes, theirs, mask, config)


def _attempts(target: Target, config: GPTConfig) -> Iterator[tuple[Sizes, bool]]:
    """Sizes to build it with, and whether its own defaults stay: first the sizes of the GPT, everywhere in the file.

    Between the attempts constants in `target.namespace` change, so each must be tried before the next is asked for.
    """
    sizes: dict[str, Any] = {
        "WIDTH": config.d_model,
        "HEADS": config.n_heads,
        "KV_HEADS": config.n_heads // 2,  # a class that asks for them gets groups of two heads, a round choice
        "HEAD_DIM": config.d_model // config.n_heads,
        "CONTEXT": config.context,
        "TOKENS": config.context,
        "DROPOUT": config.dropout,
    }
    sizes |= {name: value for name, value in target.options.args.items() if meaning_of(name) not in sizes}
    # Constants of the file are sizes, too: those with such a name get the sizes of the GPT for the first attempts.
    theirs = {n: x for n, x in target.namespace.items() if type(x) in (int, float) and meaning_of(n) in sizes}
    target.namespace.update({name: sizes[meaning_of(name)] for name in theirs})
    yield sizes, False
    # An `out` width may be that of each head: side by side, without W_O, heads come to the width of the model.
    for name in arguments_of(target.thing):
        if meaning_of(name) == "WIDTH" and "out" in name.lower():
            yield {**sizes, name: sizes["HEAD_DIM"]}, False
    target.namespace.update(theirs)  # then with the constants of the file as they are
    yield sizes, False
    yield sizes, True


def _masks(target: Target) -> list[MaskForm | None]:
    """The ways in which it may be kept from looking ahead: by itself first, then by its argument."""
    ways: list[MaskForm | None] = [None]
    if name := next(filter(MASK.search, arguments_of(target.thing.forward)), None):
        ways += itertools.product(meanings_of(target.scope, target.source, name), AXES)
    return ways


@torch.no_grad()
def reading_of(layer: LearnerAttention, target: Target, n_tokens: int) -> Reading:
    """The reading of its weights by which the correct form gives what it gives. UncheckedError where none does."""
    choices = readings(target, layer.module, folded=True)  # code without a scale is right here: see `state_of`
    x = np.random.default_rng(1).normal(size=(2, n_tokens, choices[0].weights.matrices["q"].shape[0]))
    out = layer(torch.from_numpy(x).float()).numpy()
    for causal in (True, False):  # without the mask only to say that this is what is wrong
        for reading in choices:
            if close(out, compute(reading.weights, (x, x, x), Masks(causal), reading.settings).out):
                if not causal:
                    raise UncheckedError("sees_later", name=target.name)
                return reading
    raise UncheckedError("no_such_layer", name=target.name)


# What was learned, in a layer of ours.


def state_of(reading: Reading) -> dict[str, Tensor]:
    """The same weights as our layer keeps them, (out,in), one head after the other.

    They are found by what the form makes of unit vectors, so that any layout it knows is read alike. The two of a
    rotary pair are half a head apart.
    """
    weights, settings = reading.weights, {**CORRECT, **reading.settings}
    width, joined = weights.matrices["q"].shape
    arrays = {}
    for place in "qkv":
        plain = {**settings, "qk_norm": None}  # a norm is no part of the matrix
        # Of zeros comes the bias; of the unit vectors, one as each token, the rows of the matrix and the bias.
        bias = project(weights, np.zeros((1, 1, width)), place, plain, np)[0]  # (h,1,d)
        matrix = project(weights, np.eye(width)[None], place, plain, np)[0] - bias  # (h,C,d)
        order = np.arange(bias.shape[-1])
        if place in "qk" and settings["rope"] and settings["rope"][0] == "interleaved":
            order = np.concatenate([order[::2], order[1::2]])  # pairs (2i, 2i + 1) become (i, i + d/2)
        # The scale is the usual one, or "none": then code has it in its weights. Our layer divides by sqrt(d), so
        # that W_Q is multiplied by it.
        factor = len(order) ** 0.5 if place == "q" and settings["scale"] == "none" else 1.0
        arrays[f"{place}_proj.weight"] = matrix[..., order].swapaxes(1, 2).reshape(-1, width) * factor
        arrays[f"{place}_proj.bias"] = bias[..., order].reshape(-1) * factor
        if place in "qk" and settings["qk_norm"]:
            # Gains go by the names of matrices; keys may be made by what is called W_Q, and queries by W_K.
            arrays[f"{place}_norm.weight"] = weights.gains[settings[f"{place}_from"]][order]
    # (1,h,h*d,d): a unit vector of the joined heads as each token, cut into heads.
    heads = np.eye(joined).reshape(1, joined, weights.n_heads, -1).swapaxes(1, 2)
    bias = weights.biases.get("o", np.zeros(width))
    arrays |= {"o_proj.weight": (output(weights, heads, settings, np)[0] - bias).T, "o_proj.bias": bias}
    return {name: torch.from_numpy(np.ascontiguousarray(array)).float() for name, array in arrays.items()}


class Carried(NamedTuple):
    """The model with layers of ours; how far its logits, and the maps of its heads, lie from those of the learner's.

    maps  None where the class is not watched, and then `unwatched` says why
    """

    model: GPT
    logits: float
    maps: float | None
    unwatched: str = ""


@torch.no_grad()
def carried(model: GPT, target: Target, texts: list[list[int]]) -> Carried:
    """The same model with layers of ours, held against the learner's on texts. UncheckedError where it differs."""
    model.eval()
    ours = GPT(model.config).eval()
    state = {name: tensor for name, tensor in model.state_dict().items() if ".attention." not in name}
    for number, block in enumerate(model.blocks):
        learner: Any = block.attention
        carried = state_of(reading_of(learner, target, model.config.context))
        state |= {f"blocks.{number}.attention.{name}": tensor for name, tensor in carried.items()}
    ours.load_state_dict(state)
    differences = []
    for text in texts:
        ids = torch.tensor([text])
        differences.append((model(ids) - ours(ids)).abs().max())
    difference = float(torch.stack(differences).max())  # NaN where one of them is: Python's `max` may pass over it
    if not difference <= LARGEST_DIFFERENCE:  # NaN is refused, too
        raise UncheckedError("carried_apart", difference=difference, most=LARGEST_DIFFERENCE)
    try:
        theirs, right = _maps(model, texts[0]), _maps(ours, texts[0])
    except HeadwiseError as error:
        return Carried(ours, difference, None, str(error))
    if len(theirs) < len(right):
        return Carried(ours, difference, None, target.say("some_watched", count=len(theirs), all=len(right)))
    return Carried(ours, difference, float((torch.stack(theirs) - torch.stack(right)).abs().max()))


def _maps(model: GPT, ids: list[int]) -> list[Tensor]:
    """The weights (T,T) of all heads on a text, in the order of their calls; HeadwiseError where none is read."""
    maps: list[Tensor] = []

    def keep(call: Call) -> None:
        if len(call.out):  # else it was refused
            maps.extend(row_weights(call, 0, range(call.n_queries)))

    with attach(dict.fromkeys(sites_of(model), keep)):
        model(torch.tensor([ids]))
    return maps


# The training, in a process of its own.


class Learned(NamedTuple):
    """What came of a training: the run; how far logits and maps of our layer lie from those of the learner's class."""

    run: Run
    logits: float
    maps: float | None
    unwatched: str


def train_apart(folder: Path, target: Target, steps: int | None, report: Callable[[Progress], None]) -> Learned:
    """Let the class of a file learn the verbs, in a process of its own; the folder is written once all is well.

    HeadwiseError for a folder that is not empty, where the class cannot stand in a GPT, or where its layers compute
    something else than ours with the same weights.
    """
    require_empty(folder)  # now, and not when the training is over

    def hear(line: str) -> None:
        report(from_json(Progress, json.loads(line)))

    def keep(work: Path) -> None:
        run = read_run(work / folder.name)
        if run is None or run.status != "finished":
            return
        folder.mkdir(parents=True, exist_ok=True)
        for name in reversed(FILES):  # run.json last: a folder without it is no run
            if (work / folder.name / name).is_file():
                write_whole(folder / name, (work / folder.name / name).read_bytes())

    request = {**request_of(target), "folder": folder.name, "steps": steps}
    ended = run_apart("headwise.teach.own", request, None, hear, keep)  # None: a training may take any time
    if not ended.answer:
        facts = {"path": target.source.path, "exits": target.say("exits"), "code": ended.code}
        raise HeadwiseError(target.say("ended_itself", **facts))
    answer = json.loads(ended.answer)
    if "error" in answer:
        raise HeadwiseError(answer["error"])
    run = read_run(folder)
    assert run is not None  # an answer without an error comes after the end of a training, which `keep` has copied
    return Learned(run, **answer)


def main() -> None:
    """In the process of its own: each report is a line of standard output, where what the file prints does not go."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # Reports go to what was standard output; standard output, to which the file may print, goes where errors do.
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    target, load = read_request(request)

    def report(progress: Progress) -> None:
        print(json.dumps(asdict(progress)), file=reports, flush=True)

    def work() -> dict[str, Any]:
        try:
            load()
            return train_own(Path(request["folder"]), target, request["steps"], report)
        except (Exception, SystemExit) as error:
            text = explained(error, target.source, request["lang"])
            return {"error": text if isinstance(error, HeadwiseError) else f"{Path(request['path']).name}: {text}"}

    alone(request, "", work)  # no text of code, which would only say whether torch is wanted: it is loaded already


def train_own(
    folder: Path, target: Target, steps: int | None, report: Callable[[Progress], None]
) -> dict[str, float | str | None]:
    """Train a GPT with the learner's class on the verbs, into a run folder; how near our layer comes to it."""
    # The third is the recipe, which `run_training` resolves again from settings with the class's own sizes.
    corpus, config, _ = Settings(preset="course", shape=SHAPE).resolve()
    learner = fitted(target, config)
    differing = {name: value for name, value in asdict(learner.config).items() if value != asdict(config)[name]}
    results = []

    def finish(model: GPT) -> GPT:
        # The model that is written has layers of ours. They are compared on about 2000 tokens, a round number.
        results.append(carried(model, target, corpus.data.held_out_documents(2_000)))
        return results[0].model

    settings = Settings(preset="course", steps=steps, shape=SHAPE | differing)
    run_training(folder, settings, report, resume=False, build=learner.model, finish=finish)
    result = results[0]
    return {"logits": result.logits, "maps": result.maps, "unwatched": result.unwatched}


if __name__ == "__main__":
    main()
