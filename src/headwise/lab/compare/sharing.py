"""Key/value heads that several query heads share: what it costs in quality, and what it saves when decoding."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from headwise.gpt.gpt import GPT, GPTConfig
from headwise.lab.compare.experiment import Arm, Experiment, Report
from headwise.lab.compare.experiments import SHAPE, VERBS_OR_TEXT
from headwise.lab.compare.results import Table
from headwise.lab.compare.timing import FASTER, in_turn, median_ratio, milliseconds
from headwise.rungs.cache import KVCache

N_HEADS = 8

ARMS = (
    Arm(name="MHA", about=f"{N_HEADS} key/value heads", shape={**SHAPE, "n_heads": N_HEADS}),
    Arm(name="GQA", about="2 key/value heads", shape={**SHAPE, "n_heads": N_HEADS, "n_kv_heads": 2}, widened=True),
    Arm(name="MQA", about="1 key/value head", shape={**SHAPE, "n_heads": N_HEADS, "n_kv_heads": 1}, widened=True),
)

# Decoding is timed on models with weights as drawn, wide enough for memory to count: 2 layers, 16 heads of 64.
DECODED = {"n_layers": 2, "n_heads": 16, "d_model": 1024, "d_ff": 2048}
KV_HEADS = {"MHA": 16, "GQA": 4, "MQA": 1}
CONTEXTS, BATCHES, ROUNDS = (256, 1024, 4096, 16384), (1, 4), 9


def cost_and_speed(report: Report) -> tuple[Table, ...]:
    report("sharing: measuring caches", 0, 2)
    caches = cache_bytes()
    report("sharing: timing decoding", 1, 2)
    return caches, decoding_speed()


@torch.no_grad()
def cache_bytes(tokens: int = 17) -> Table:
    """Bytes that a token takes in the caches of all layers: by the formula, and held by real ones."""
    rows = []
    for arm in ARMS:
        config = GPTConfig(vocab_size=tokens, **arm.shape)
        formula = config.n_layers * config.attention.cache_values_per_token * torch.float32.itemsize
        model = GPT(config)
        caches = model.new_caches()
        model(torch.arange(tokens)[None], caches)
        rows.append((arm.name, formula, sum(cache.nbytes for cache in caches) / tokens))
    return Table(
        "Cache bytes per token, float32",
        ("arm", "by the formula", "measured"),
        tuple(rows),
        "Formula: layers x key/value heads x (key width + value width) x 4 bytes. "
        f"Measured: what the caches hold after {tokens} tokens, divided by {tokens}.",
    )


def decoding_speed(contexts: Sequence[int] = CONTEXTS, batches: Sequence[int] = BATCHES, rounds: int = ROUNDS) -> Table:
    """Tokens per second of one decode step after `context` cached tokens, and the ratios to MHA."""
    models = _decoded_models(max(contexts) + 1)
    shared = [name for name in models if name != "MHA"]
    ratios: dict[tuple[int, int], dict[str, float]] = {}
    rows = []
    for batch, context in itertools.product(batches, contexts):
        times = in_turn({name: _Step(model, batch, context) for name, model in models.items()}, rounds)
        ratios[batch, context] = {name: median_ratio(times, "MHA", name) for name in shared}
        speeds = (1000 * batch / milliseconds(times, name) for name in models)
        rows.append((batch, context, *speeds, *ratios[batch, context].values()))
    sizes = f"{DECODED['n_layers']} layers of width {DECODED['d_model']}, {DECODED['n_heads']} query heads"
    return Table(
        "Decoding: tokens per second",
        ("batch", "context", *models, *(f"{name} / MHA" for name in shared)),
        tuple(rows),
        f"{sizes}, key/value heads {', '.join(f'{n} in {name}' for name, n in KV_HEADS.items())}, feed-forwards "
        f"widened to equal parameters; keys and values are not repeated; float32, one thread, medians of {rounds} "
        f"rounds. {' '.join(where_it_pays(ratios))}",
    )


def where_it_pays(ratios: Mapping[tuple[int, int], Mapping[str, float]]) -> list[str]:
    """For each batch and way, from which context on it pays; `ratios` has (batch, context), contexts rising."""
    sentences = []
    for batch in dict.fromkeys(batch for batch, _ in ratios):
        of_batch = {context: ratio for (size, context), ratio in ratios.items() if size == batch}
        last = max(of_batch)
        for name in of_batch[last]:
            slow = [context for context, ratio in of_batch.items() if ratio[name] < FASTER]
            after = [context for context in of_batch if not slow or context > slow[-1]]
            where = f"pays from {after[0]:,} cached tokens on" if after else f"does not pay up to {last:,}"
            sentences.append(f"At batch {batch} {name} {where}.")
    return sentences


def _decoded_models(context: int) -> dict[str, GPT]:
    base = Experiment(
        name="decoding",
        question="",
        task=VERBS_OR_TEXT,
        arms=tuple(
            Arm(name=name, shape={**DECODED, "context": context, "n_kv_heads": kv_heads}, widened=name != "MHA")
            for name, kv_heads in KV_HEADS.items()
        ),
    )
    with torch.random.fork_rng(devices=[]):
        return {arm.name: GPT(base.config(arm, vocab_size=64)).eval() for arm in base.arms}


class _Step:
    """One token more for each text of a batch, after `context` tokens in static caches."""

    def __init__(self, model: GPT, batch: int, context: int) -> None:
        spec = model.config.attention
        self.model, self.context = model, context
        self.caches = [KVCache(max_length=context + 1) for _ in range(model.config.n_layers)]
        self.ids = torch.zeros(batch, 1, dtype=torch.long)
        with torch.no_grad():
            for cache in self.caches:
                # The values do not matter for the time, as long as they are ordinary numbers.
                k, v = (torch.ones(batch, spec.n_kv_heads, context, w) for w in (spec.head_dim, spec.value_dim))
                cache.append(k, v)

    def __call__(self) -> None:
        self.model(self.ids, self.caches, last_only=True)
        for cache in self.caches:
            cache.crop(self.context)


SHARING = Experiment(
    name="sharing",
    question="What do shared key/value heads cost in quality, and what do they save?",
    task=VERBS_OR_TEXT,
    arms=ARMS,
    timed=cost_and_speed,
)
