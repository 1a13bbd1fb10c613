"""The learner's own class in a GPT: it learns the verbs in place of our layer, and ours then reads what it learned.

The class goes into every block, and its forward and backward do all of the training. Its weights begin as those that
the GPT draws, so that a right class learns what ours would learn. Afterwards they are carried into a layer of ours by
`from_course`, and the logits of both models are compared on held-out text. So a run folder is written like any other:
every command reads it, and the heads in its report are the learner's. All of it happens in a process of its own, under
the guard of `sandbox`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.files import read_text, write_whole
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.run import FILES, Run, Settings, read_run, run_training
from headwise.gpt.train import Progress, one_thread
from headwise.layer.importing.importers import from_course
from headwise.layer.layer import MultiHeadAttention
from headwise.records import from_json
from headwise.rungs.cache import KVCache
from headwise.teach.bugs import UncheckedError, words
from headwise.teach.check import explained
from headwise.teach.exercises import with_course_names
from headwise.teach.sandbox import alone, run_apart
from headwise.teach.source import Source

PLACES = {"W_query": "q_proj", "W_key": "k_proj", "W_value": "v_proj", "out_proj": "o_proj"}
LARGEST_DIFFERENCE = 1e-3  # of logits, which are of the order of 10: float32, two layers, sums in another order
SHAPE = {"bias": True}  # of the preset `course`: a course's class has a bias in its last projection


class LearnerAttention(nn.Module):
    """A module of the learner where a GPT has its attention."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        result: Tensor = self.module(x)
        return result


def load_class(path: Path, name: str = "MultiHeadAttention") -> Callable[..., nn.Module]:
    """The class of that name in a file of the learner, which is run. HeadwiseError where that fails."""
    names: dict[str, Any] = {"__name__": "learner", "__file__": str(path)}
    try:
        exec(compile(read_text(path), str(path), "exec"), names)
        with_course_names(names)
    except Exception as error:
        raise UncheckedError("no_run", path=path, error=f"{type(error).__name__}: {error}") from None
    if not isinstance(names.get(name), type):
        raise UncheckedError("no_class", path=path, name=name)
    attention: Callable[..., nn.Module] = names[name]
    return attention


def train_apart(
    folder: Path, path: Path, steps: int | None, report: Callable[[Progress], None], lang: str
) -> tuple[Run, float]:
    """Do as `train_own` with the class in a file, in a process of its own; the folder is written once all is well."""

    def hear(line: str) -> None:
        report(from_json(Progress, json.loads(line)))

    def keep(work: Path) -> None:
        run = read_run(work / folder.name)
        if run is None or run.status != "finished":
            return
        folder.mkdir()
        for name in reversed(FILES):  # run.json last: a folder without it is no run
            if (work / folder.name / name).is_file():
                write_whole(folder / name, (work / folder.name / name).read_bytes())

    request = {"path": str(path.resolve()), "folder": folder.name, "steps": steps, "lang": lang}
    ended = run_apart("headwise.teach.own", request, None, hear, keep)
    if not ended.answer:
        say = words(lang)
        raise HeadwiseError(say["ended_itself"].format(path=path, exits=say["exits"], code=ended.code))
    answer = json.loads(ended.answer)
    if "error" in answer:
        raise HeadwiseError(answer["error"])
    run = read_run(folder)
    assert run is not None
    return run, answer["difference"]


def main() -> None:
    """In the process of its own: each report is a line of standard output, where what the file prints does not go."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    path = Path(request["path"])

    def report(progress: Progress) -> None:
        print(json.dumps(asdict(progress)), file=reports, flush=True)

    def work() -> dict[str, Any]:
        try:
            _, difference = train_own(Path(request["folder"]), load_class(path), request["steps"], report)
        except UncheckedError as error:
            return {"error": error.text(request["lang"])}
        except HeadwiseError as error:
            return {"error": str(error)}
        except Exception as error:
            source = Source(read_text(path), str(path))
            return {"error": f"{path.name}: {explained(error, source, request['lang'])}"}
        return {"difference": difference}

    alone(request, "", work)


def train_own(
    folder: Path, attention: Callable[..., nn.Module], steps: int | None, report: Callable[[Progress], None]
) -> tuple[Run, float]:
    """Train a GPT with the learner's class on the verbs, into a run folder; and the largest difference of the logits.

    attention  a class with the arguments (d_in, d_out, context_length, dropout, num_heads, qkv_bias) and the attributes
               W_query, W_key, W_value, out_proj, num_heads and mask, as courses write it

    Raises HeadwiseError where its layers compute something else than ours with the same weights.
    """
    differences: list[float] = []

    def build(config: GPTConfig) -> GPT:
        return with_attention(config, attention)

    def finish(model: GPT) -> GPT:
        ours, difference = carried(model, settings.resolve()[0].data.held_out_documents(2_000))
        differences.append(difference)
        return ours

    settings = Settings(preset="course", steps=steps, shape=SHAPE)
    with one_thread():
        result = run_training(folder, settings, report, resume=False, build=build, finish=finish)
    return result, differences[0]


def with_attention(config: GPTConfig, attention: Callable[..., nn.Module]) -> GPT:
    """A GPT with a layer of this class in each block, its weights those that the GPT has drawn for ours."""
    model = GPT(config)
    for block in model.blocks:
        ours: Any = block.attention
        module = attention(config.d_model, config.d_model, config.context, config.dropout, config.n_heads, config.bias)
        drawn = ours.state_dict()
        keys = [(theirs, place, kind) for theirs, place in PLACES.items() for kind in ("weight", "bias")]
        state = {f"{theirs}.{kind}": drawn[f"{place}.{kind}"] for theirs, place, kind in keys}
        module.load_state_dict(state, strict=False)
        block.attention = LearnerAttention(module)
    return model


@torch.no_grad()
def carried(model: GPT, texts: list[list[int]]) -> tuple[GPT, float]:
    """The same model with layers of ours, and how far its logits lie from those of the learner's on texts."""
    ours = GPT(model.config)
    state = {name: tensor for name, tensor in model.state_dict().items() if ".attention." not in name}
    for number, block in enumerate(model.blocks):
        learner: Any = block.attention
        layer: MultiHeadAttention = from_course(learner.module).layer
        state |= {f"blocks.{number}.attention.{name}": tensor for name, tensor in layer.state_dict().items()}
    ours.load_state_dict(state)
    ours.eval(), model.eval()
    difference = max(float((model(ids) - ours(ids)).abs().max()) for ids in map(_batch, texts))
    if not difference <= LARGEST_DIFFERENCE:
        raise UncheckedError("carried_apart", difference=difference, most=LARGEST_DIFFERENCE)
    return ours, difference


def _batch(ids: list[int]) -> Tensor:
    return torch.tensor([ids])


if __name__ == "__main__":
    main()
