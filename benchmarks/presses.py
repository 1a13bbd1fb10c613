"""Plans of `hw.windows` beside the presses of kvpress: what is answered rightly, against the bytes that a cache holds.

    pip install --no-deps kvpress==0.5.5 accelerate datasets peft fire==0.6.0 six cachetools==5.5.2 \
        multiprocess dill xxhash httpx httpcore h11 termcolor

Models: the parents of `memory`, which must look far, one for each seed; stock transformers reads their folders for
kvpress. Tasks in RULER's manner (Hsieh et al. 2024, arXiv 2404.06654): held-out pieces of their text, which is full of
needles of eight words, and of which one is asked for that was said once, or more often, but not in the last FAR tokens;
and two needles, of which the second begins where the first ends, as a variable is handed on, among words that stand in
none. Counting is no task here: the text has no numbers. The question is the first three words of a needle, and what is
right is counted in words, each after the right ones before it. The question comes after the cache was cut; `asked`, its
words but the last stand at the end of the text that is cut. Plans are chosen on the training text, without any task.
Bytes are those of keys and values after the text; a press that masks rows keeps them. Precision float32.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from benchmarks.memory import CONTEXT, FAR, LOOK, NAMES, NEEDLE, PARENTS, STAGES, parent, text
from headwise.corpus.tokens import Tokens
from headwise.gpt.gpt import GPT

DOCUMENTS, QUESTION, TIMED = 20, 3, 32  # TIMED: tokens of one text that are written after another
SHARES = (0.5, 0.25, 0.125, 0.0625)  # of the cache
DONE = 0.5  # a task of which the whole cache answers less is left out

Step = Callable[[Tensor], Tensor]  # ids (B,1) -> logits (B,V) of what follows them
Side = Callable[[Tensor, float], tuple[Step, int]]  # a text (B,T), the share to keep -> how it goes on, bytes held
Task = tuple[Tensor, Tensor, Tensor]  # texts (B,T), questions (B,3), answers (B,A)


def run(runs: int) -> dict[str, Any]:
    try:
        import kvpress  # noqa: F401
    except ImportError as error:
        return {"table": f"not run: kvpress cannot be imported ({error}); the top of benchmarks/presses.py tells how"}
    seeds = []
    for seed in range(runs):
        seeds.append(measured(seed))
        print(f"presses seed {seed}: {seeds[-1]}", file=sys.stderr)
    return {"seeds": seeds, "table": _table(seeds)}


@torch.no_grad()
def measured(seed: int) -> dict[str, Any]:
    """Of one parent, for each task, side and share: words right and bytes held."""
    from transformers import AutoModelForCausalLM

    with torch.enable_grad():
        model, tokens = parent(seed)
    stock = AutoModelForCausalLM.from_pretrained(PARENTS / f"seed{seed}").eval()
    ids = torch.tensor(tokens.encode(text(seed, STAGES[-1][1])))
    reach = hw.windows(model, ids[: LOOK * CONTEXT].view(LOOK, CONTEXT).tolist())
    sides: dict[str, Side] = {"plan": planned(model, reach)} | presses(stock)
    row: dict[str, Any] = {"retrieve": [n for n in reach if reach[n].retrieves], "tasks": {}, "failed": {}}
    for name, task in tasks(ids, tokens, seed).items():
        whole, held = right(planned(model, None), task, 1.0, False)
        assert abs(right(pressed(stock, None), task, 1.0, False)[0] - whole) < 0.01
        row["tasks"][name] = {"whole": whole, "bytes": held, "sides": {}}
        for asked in (False, True) if whole >= DONE else ():
            for side, read in sides.items():
                points: dict[float, tuple[float, int]] = {}
                try:
                    for share in SHARES:
                        points[share] = right(read, task, share, asked)
                except hw.HeadwiseError as error:  # a plan needs more than that
                    print(f"presses: {error}", file=sys.stderr)
                except Exception as error:
                    row["failed"][side] = f"{type(error).__name__}: {error}"[:200]
                row["tasks"][name]["sides"][f"{side}{', asked' * asked}"] = points
                print(f"presses: {name}, {side}{', asked' * asked}: {points}", file=sys.stderr)
    row["tokens a second"] = speeds(model, stock, reach)
    return row


def tasks(ids: Tensor, tokens: Tokens, seed: int) -> dict[str, Task]:
    """The tasks of a parent: pieces of its held-out text, full of needles, of which one is begun again at the end."""
    draw, held_out = random.Random(seed), ids[int(0.9 * len(ids)) :].tolist()
    names = {tokens.vocabulary[f"N{n}"] for n in range(NAMES)}

    def documents(least: int, most: int) -> Task:
        """The needle was said so many times, and not in the last FAR tokens."""
        texts, questions, answers = [], [], []
        length = CONTEXT - NEEDLE
        while len(texts) < DOCUMENTS:
            start = draw.randrange(len(held_out) - length)
            words = held_out[start : start + length]
            said: dict[tuple[int, ...], list[int]] = {}  # where each needle begins
            for t in range(length - NEEDLE):
                if words[t] not in names and names.issuperset(words[t + 1 : t + 1 + NEEDLE]):
                    said.setdefault(tuple(words[t + 1 : t + 1 + NEEDLE]), []).append(t + 1)
            far = [x for x, at in said.items() if least <= len(at) <= most and at[-1] + NEEDLE < length - FAR]
            if far:
                needle = draw.choice(far)
                texts.append(words)
                questions.append(needle[:QUESTION])
                answers.append(needle[QUESTION:])
        return torch.tensor(texts), torch.tensor(questions), torch.tensor(answers)

    def chained() -> Task:
        """Two needles among words that stand in none; the second begins where the first ends."""
        texts, questions, answers = [], [], []
        others = [i for i in held_out if i not in names]
        for _ in range(DOCUMENTS):
            both = draw.sample(sorted(names), 2 * NEEDLE - 1)
            pieces = others[: CONTEXT - QUESTION - 4 * NEEDLE]
            late, early = draw.sample(range(len(pieces)), 2)
            for place, needle in sorted([(late, both[NEEDLE - 1 :]), (early, both[:NEEDLE])], reverse=True):
                pieces[place:place] = needle
            texts.append(pieces)
            questions.append(both[:QUESTION])
            answers.append(both[QUESTION:])
        return torch.tensor(texts), torch.tensor(questions), torch.tensor(answers)

    return {
        "many keys, said once": documents(1, 1),
        "many keys, said twice or more": documents(2, 99),
        "chain": chained(),
    }


def right(read: Side, task: Task, share: float, asked: bool) -> tuple[float, int]:
    """The share of the answers' words that come first, each after the right ones before it; and the bytes held."""
    texts, questions, answers = task
    if asked:
        texts, questions = torch.cat([texts, questions[:, :-1]], 1), questions[:, -1:]
    step, held = read(texts, share)
    later, hits = torch.cat([questions, answers], 1), []
    for t in range(later.shape[1] - 1):
        best = step(later[:, t : t + 1]).argmax(-1)
        if t >= questions.shape[1] - 1:
            hits.append(best == later[:, t + 1])
    return float(torch.stack(hits).double().mean()), held // len(texts)


def planned(model: GPT, reach: hw.Windows | None) -> Side:
    """Our own caches, with the plan of that share."""

    def read(texts: Tensor, share: float) -> tuple[Step, int]:
        caches = model.new_caches(None if reach is None else reach.plan(cache=share))
        model(texts, caches, last_only=True)
        return lambda ids: model(ids, caches, last_only=True)[:, -1], sum(cache.nbytes for cache in caches)

    return read


def pressed(model: Any, make: Callable[[float], Any] | None) -> Side:
    """Stock transformers, whose cache a press cuts after the text."""
    from transformers import DynamicCache

    def read(texts: Tensor, share: float) -> tuple[Step, int]:
        press, cache, length = make and make(1 - share), DynamicCache(config=model.config), texts.shape[1]
        model.set_attn_implementation("eager" if type(press).__name__ == "ObservedAttentionPress" else "sdpa")
        if press is None:
            model.model(input_ids=texts, past_key_values=cache)
        else:
            with cache_positions(model), press(model):
                model.model(input_ids=texts, past_key_values=cache)

        def step(ids: Tensor) -> Tensor:
            nonlocal length
            position = torch.full_like(ids, length)
            length += 1
            return model(input_ids=ids, past_key_values=cache, position_ids=position).logits[:, -1]

        return step, sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    return read


@contextmanager
def cache_positions(model: Any) -> Iterator[None]:
    """Presses read `cache_position` of an attention's arguments, which transformers gives no more since 5.3."""

    def give(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"cache_position": kwargs["position_ids"][0]}

    hooks = [layer.self_attn.register_forward_pre_hook(give, with_kwargs=True) for layer in model.model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def presses(model: Any) -> dict[str, Side]:
    return {name: pressed(model, make) for name, make in press_makers().items()}


def press_makers() -> dict[str, Callable[[float], Any]]:
    """Of the share that is cut: the presses that need nothing trained for a model; the last masks rows, keeps them."""
    import kvpress as kv

    plain = ("Random", "Knorm", "StreamingLLM", "SnapKV", "TOVA", "ObservedAttention", "ExpectedAttention", "KeyDiff",
             "LagKV", "PyramidKV", "CUR", "CriticalKV", "AdaKV")  # fmt: skip
    makers: dict[str, Callable[[float], Any]] = {}
    for name in plain:
        kind = getattr(kv, f"{name}Press")
        if name in ("CriticalKV", "AdaKV"):
            makers[name] = lambda ratio, kind=kind: kind(kv.ExpectedAttentionPress(ratio))
        else:
            makers[name] = lambda ratio, kind=kind: kind(compression_ratio=ratio)
    return makers


def speeds(model: GPT, stock: Any, reach: hw.Windows) -> dict[str, float]:
    """Tokens a second of processor time that follow a text, one text at a time; medians of five, in turn."""
    from kvpress import KnormPress

    sides: dict[str, tuple[Side, float]] = {
        "ours, whole": (planned(model, None), 1.0),
        "ours, plan of 0.5": (planned(model, reach), 0.5),
        "stock, whole": (pressed(stock, None), 1.0),
        "stock, Knorm 0.5": (pressed(stock, lambda ratio: KnormPress(ratio)), 0.5),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    ids = torch.randint(model.config.vocab_size, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    for _ in range(5):
        for name, (read, share) in sides.items():
            step, _ = read(ids[:, : CONTEXT - TIMED], share)
            began = time.process_time()
            for t in range(TIMED):
                step(ids[:, t : t + 1])
            seconds[name].append(time.process_time() - began)
    return {name: TIMED / statistics.median(each) for name, each in seconds.items()}


def _table(seeds: list[dict[str, Any]]) -> str:
    """Means over the seeds that can do a task: words right, the area, and how many times fewer bytes are enough."""
    lines = []
    for name in seeds[0]["tasks"]:
        rows = [row["tasks"][name] for row in seeds]
        whole = ", ".join(f"{row['whole']:.3f}" for row in rows)
        lines.append(f"{name}: right with the whole cache {whole}, {rows[0]['bytes']:,} bytes a text")
        rows = [row for row in rows if row["sides"]]
        if not rows:
            lines.append("  left out: the models cannot do it with all of the cache")
            continue
        lines.append(f"  of {len(rows)} that can do it:")
        lines.append(
            f"  {'':26}" + "".join(f"{share:>7}" for share in SHARES) + "   area  times fewer bytes at 0.01 less"
        )
        for side in rows[0]["sides"]:
            cells = []
            for share in SHARES:
                words = [row["sides"][side][share][0] for row in rows if share in row["sides"][side]]
                cells.append(f"{statistics.fmean(words):7.2f}" if len(words) == len(rows) else "      -")
            area = statistics.fmean(_area(row, side) for row in rows)
            fewer = ", ".join(f"{_fewer(row, side):.1f}" for row in rows)
            lines.append(f"  {side:26}{''.join(cells)}   {area:4.2f}  {fewer}")
    for row in seeds:
        speed = ", ".join(f"{name} {tokens:.0f}" for name, tokens in row["tokens a second"].items())
        lines.append(f"tokens a second of processor time: {speed}; heads that retrieve: {', '.join(row['retrieve'])}")
        lines += [f"failed: {side}: {why}" for side, why in row["failed"].items()]
    return "\n".join(lines)


def _area(row: dict[str, Any], side: str) -> float:
    """Of the whole cache's words, the mean over the shares of what is right with no more bytes than that share."""
    points, each = row["sides"][side].values(), []
    for share in SHARES:
        within = [words for words, held in points if held <= 1.02 * share * row["bytes"]]  # rows are whole
        each.append(max(within, default=0.0) / row["whole"])
    return statistics.fmean(each)


def _fewer(row: dict[str, Any], side: str) -> float:
    """The whole cache's bytes over the fewest with which at most one word of a hundred is lost."""
    enough = [held for words, held in row["sides"][side].values() if words >= row["whole"] - 0.01]
    return row["bytes"] / min(enough, default=row["bytes"])
