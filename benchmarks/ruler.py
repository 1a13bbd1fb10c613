"""RULER's tasks on Gemma 3 270M: answers right against the bytes that its cache holds, our plans beside kvpress.

The tasks are those of Hsieh et al. 2024 (arXiv 2404.06654): a needle, one of several needles, a variable that is handed
on, and what is said most often. Their sentences, written here, stand between lines of tinyshakespeare, none in the last
NEAR tokens, which the layers with a window of 512 still hold. The question comes after the cache was cut. An answer is
right when each of its tokens is the likeliest after the right ones before it: then it is what the model would write.

Each text is read once for all presses: a press acts on a layer's keys and values after that layer has attended to the
whole text, so what the next layers read is the same; its own hook is called with what the layer's call was. kvpress
knows Gemma 3 with images, of which it passes over the layers with a window; so here, too. A plan masks while it reads:
each text is read again for each plan. A plan of a share holds no more bytes than a press of that share. Bytes are those
of keys and values of all 18 layers after the text, in bfloat16. The top of benchmarks/presses.py tells what to install.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from benchmarks.presses import press_makers
from benchmarks.reshape import TEXT
from headwise.layer.importers import import_attention

MODEL = Path(__file__).resolve().parents[1] / "build" / "models" / "gemma-3-270m"
LENGTH, TEXTS, NEAR, LOOK = 1_500, 10, 600, 4  # tokens of a text, texts of a task, documents that plans are chosen by
SHARES = (0.5, 0.25, 0.125)  # of the rows of the layers that keep all
DONE = 0.5  # a task of which the whole cache answers less is left out
PEOPLE = ("Agnes", "Bruno", "Clara", "Diego", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karla", "Linus")
ANIMALS = ("fox", "wolf", "bear", "horse", "goose", "snake")
CITIES = ("Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Delhi", "Tokyo", "Paris", "Rome", "Vienna", "Prague", "Dublin")
LETTERS = "BCDFGHJKLMNPQRSTVWXZ"
GOES_ON = "the next 64 tokens of a text"  # no task: what a cut costs where nothing is asked
NO_MASKS = {"full_attention": None, "sliding_attention": None}  # Gemma is to make none of its own

Point = tuple[bool, float, int]  # is an answer right, the loss on it in nats a token, and the bytes held
Task = tuple[Tensor, Tensor, Tensor]  # ids of a text (1,LENGTH), of the question after it (1,Q), of the answer (1,A)


def run(runs: int) -> dict[str, Any]:
    """One run, whatever `runs` says: nothing here is drawn but the texts."""
    if not (MODEL.exists() and TEXT.exists()):
        return {"table": f"not run: {MODEL} or {TEXT} is absent"}
    try:
        makers = press_makers()
    except ImportError as error:
        return {"table": f"not run: kvpress cannot be imported ({error}); the top of benchmarks/presses.py tells how"}
    del makers["AdaKV"]  # it divides rows among the key/value heads of a layer, of which there is one
    result = measured(makers)
    return result | {"table": _table(result)}


@torch.no_grad()
def measured(makers: dict[str, Callable[[float], Any]]) -> dict[str, Any]:
    """Of each task, side and share: which texts' answers are right, and the bytes held of a text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    stock = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16, attn_implementation="eager").eval()
    hay = tokenizer(TEXT.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
    reach = hw.windows(stock, torch.tensor(hay[: LOOK * LENGTH]).view(LOOK, LENGTH).tolist())
    ours = copy.deepcopy(stock)
    for block in ours.model.layers:
        block.self_attn = _Ours(block.self_attn)
    heads = {name: (reach[name].retrieves, [round(x.mean) for x in reach[name].reached]) for name in reach}
    print(f"ruler: {heads}", file=sys.stderr)
    plans_of = {
        "plan": {share: reach.plan(cache=rows(share)) for share in SHARES},
        "plan, half of all": {0.5: reach.plan(cache=rows(1) / 2)},
    }
    result: dict[str, Any] = {"heads": heads, "tasks": {}, "failed": {}}
    for name, texts in tasks(tokenizer, hay[LOOK * LENGTH :]).items():
        read = [_Read(stock, text) for text in texts]
        whole = [each.pressed(None) for each in read]
        sides: dict[str, dict[float, list[Point]]] = {}
        print(f"ruler: {name}: {whole}", file=sys.stderr)
        if name == GOES_ON or sum(right for right, *_ in whole) >= DONE * TEXTS:
            for side, plans in plans_of.items():
                sides[side] = {share: [planned(ours, text, plan) for text in texts] for share, plan in plans.items()}
                print(f"ruler: {name}, {side}: {sides[side]}", file=sys.stderr)
            for side, make in makers.items():
                try:
                    sides[side] = {share: [each.pressed(make(1 - share)) for each in read] for share in SHARES}
                except Exception as error:
                    result["failed"][side] = f"{type(error).__name__}: {error}"[:200]
                print(f"ruler: {name}, {side}: {sides.get(side)}", file=sys.stderr)
        result["tasks"][name] = {"whole": whole, "sides": sides}
    return result


def rows(share: float) -> float:
    """That a press of such a share leaves, of those that all layers had if none had a window."""
    return (3 * int(share * LENGTH) + 15 * 511) / (18 * LENGTH)


def tasks(tokenizer: Any, hay: list[int]) -> dict[str, list[Task]]:
    """Their texts, all of LENGTH tokens, with another stretch of the hay each."""
    draw = random.Random(0)

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    ends = {i for word, i in tokenizer.get_vocab().items() if set(word) == {"\n"}}  # of a line

    def task(facts: list[str], question: str, answer: str) -> Task:
        """A text in which the facts stand in their order, each after the end of a line."""
        lines = [ids(f"{fact}\n") for fact in facts]
        room = LENGTH - 1 - sum(map(len, lines))
        start = draw.randrange(len(hay) - room)
        text = hay[start : start + room]
        places = [n + 1 for n, i in enumerate(text[:-NEAR]) if i in ends]
        for place, line in reversed([*zip(sorted(draw.choices(places, k=len(lines))), lines, strict=True)]):
            text[place:place] = line
        parts = [tokenizer.bos_token_id, *text], ids(f"\n{question}"), ids(f" {answer}")
        return tuple(torch.tensor([part]) for part in parts)  # type: ignore[return-value]

    def number() -> str:
        return str(draw.randrange(10_000, 100_000))

    def needle() -> Task:
        person, value = draw.choice(PEOPLE), number()
        return task([f"The secret number of {person} is {value}."], f"The secret number of {person} is", value)

    def one_of_eight() -> Task:
        places = dict(zip(draw.sample(PEOPLE, 8), draw.sample(CITIES, 8), strict=True))
        person = draw.choice([*places])
        facts = [f"{name} was born in the city of {city}." for name, city in places.items()]
        return task(facts, f"{person} was born in the city of", places[person])

    def count() -> Task:
        """One animal is seen twelve times, each other one once."""
        most = draw.choice(ANIMALS)
        seen = [*ANIMALS, *[most] * 11]
        draw.shuffle(seen)
        facts = [f"Today {draw.choice(PEOPLE)} saw a {animal}." for animal in seen]
        return task(facts, "Most of all, people saw a", most)

    def chain() -> Task:
        """A variable that is handed on twice."""
        a, b, c = draw.sample([x + y for x in LETTERS for y in LETTERS], 3)
        value = number()
        return task([f"Let {a} = {value}.", f"Let {b} = {a}.", f"Let {c} = {b}."], f"The value of {c} is", value)

    def goes_on() -> Task:
        start = draw.randrange(len(hay) - LENGTH - 64)
        text = [tokenizer.bos_token_id, *hay[start : start + LENGTH + 64]]
        parts = text[:LENGTH], text[LENGTH : LENGTH + 1], text[LENGTH + 1 :]
        return tuple(torch.tensor([part]) for part in parts)  # type: ignore[return-value]

    makers = {
        "needle": needle,
        "one of eight needles": one_of_eight,
        "count": count,
        "chain": chain,
        GOES_ON: goes_on,
    }
    return {name: [make() for _ in range(TEXTS)] for name, make in makers.items()}


def answered(model: Any, task: Task, **how: Any) -> tuple[bool, float]:
    """Is the answer what the model would write after the text, which it has read, and the question; and the loss."""
    _, question, answer = task
    ids = torch.cat([question, answer[:, :-1]], 1)
    hidden = model.model(input_ids=ids, attention_mask=NO_MASKS, **how).last_hidden_state
    logits = model.lm_head(hidden[0, -answer.shape[1] :]).float()
    return bool((logits.argmax(-1) == answer[0]).all()), float(F.cross_entropy(logits, answer[0]))


def planned(model: Any, task: Task, plan: hw.Plan | None) -> Point:
    """Ours, which reads the text with the plan."""
    layers = [block.self_attn for block in model.model.layers]
    for n, layer in enumerate(layers):
        rolling = hw.KVCache(window=layer.window) if layer.window else hw.KVCache()
        layer.cache = rolling if plan is None else hw.KVCache(plan=plan.layer(n))
    model.model(input_ids=task[0], attention_mask=NO_MASKS, use_cache=False)
    held = sum(layer.cache.nbytes for layer in layers)
    return *answered(model, task, use_cache=False), held


class _Ours(nn.Module):
    """Gemma's attention in our form, with a cache that takes a plan."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.layer, self.window = import_attention(attention).layer, attention.sliding_window
        self.cache = hw.KVCache()

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self.layer(hidden_states, cache=self.cache), None


class _Read:
    """A text that the stock model has read with its whole cache, for one press after another."""

    def __init__(self, model: Any, task: Task) -> None:
        from transformers import DynamicCache

        self.model, self.task, self.cache = model, task, DynamicCache(config=model.config)
        self.layers = [layer.self_attn for layer in model.model.layers]
        self.calls: list[tuple[Any, ...]] = []  # of the layers that keep all: what a press's hook is called with
        hooks = []
        for layer in self.layers:
            if not layer.is_sliding:
                hooks.append(layer.register_forward_hook(lambda *call: self.calls.append(call), with_kwargs=True))
        model.model(input_ids=task[0], past_key_values=self.cache)
        for hook in hooks:
            hook.remove()

    def pressed(self, press: Any) -> Point:
        """With what a press leaves of the cache."""
        cache = copy.deepcopy(self.cache)
        if press is not None:
            press.post_init_from_model(self.model)
            # Presses read the positions of a call, and the angles of a layer; transformers has these no more, or in
            # another form.
            more = {"past_key_values": cache, "cache_position": torch.arange(LENGTH)}
            for layer, args, kwargs, output in self.calls:
                layer.rotary_emb = partial(self.model.model.rotary_emb, layer_type=layer.layer_type)
                press.forward_hook(layer, args, kwargs | more, output)
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

        def masked(layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            """The layers hold rows of several lengths, so each gets a mask of its own."""
            n_new, n_held = kwargs["hidden_states"].shape[1], cache.layers[layer.layer_idx].keys.shape[2]
            unseen = torch.ones(n_new, n_held + n_new, dtype=torch.bool).triu(n_held + 1)
            if layer.is_sliding:
                unseen |= torch.ones_like(unseen).tril(n_held - layer.sliding_window)
            mask = torch.zeros(unseen.shape, dtype=torch.bfloat16).masked_fill(unseen, -torch.inf)
            return args, kwargs | {"attention_mask": mask[None, None]}

        hooks = [layer.register_forward_pre_hook(masked, with_kwargs=True) for layer in self.layers]
        n_later = self.task[1].shape[1] + self.task[2].shape[1] - 1
        positions = torch.arange(LENGTH, LENGTH + n_later)[None]
        answer = answered(self.model, self.task, position_ids=positions, past_key_values=cache)
        for hook in hooks:
            hook.remove()
        return *answer, held


def _table(result: dict[str, Any]) -> str:
    """At each share: answers that are right, the loss on all, the bytes of a text."""
    lines = []
    for name, row in result["tasks"].items():
        lines.append(f"{name}: {_cell(row['whole'])} with the whole cache")
        for side, points in row["sides"].items():
            lines.append(f"  {side:20}" + "".join(f"{_cell(each):>24}" for each in points.values()))
    lines += [f"failed: {side}: {why}" for side, why in result["failed"].items()]
    names = [name for name, (retrieves, _) in result["heads"].items() if retrieves]
    return "\n".join([*lines, f"heads that retrieve: {', '.join(names)}"])


def _cell(points: list[Point]) -> str:
    right = sum(is_right for is_right, *_ in points)
    loss = sum(nats for _, nats, _ in points) / len(points)
    return f"{right}, {loss:.2f} nats, {points[0][2] / 1e6:.2f} MB"
