"""Continuing a text: `hw.generate(model, ids, n)` beside `model.generate` of transformers, a Llama of 45 M, greedy.

Both sides take turns within one process; medians of processor time, for the machine may be busy.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

import headwise as hw

PROMPTS, NEW = (64, 2048), 32
SHAPE = {"num_hidden_layers": 12, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
SHAPE |= {"intermediate_size": 1536, "vocab_size": 8192, "max_position_embeddings": 4096}


def run(runs: int) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, eos_token_id=None, pad_token_id=0)).eval()  # type: ignore[arg-type]
    rows = []
    for tokens in PROMPTS:
        ids = torch.randint(3, 8000, (1, tokens), generator=torch.Generator().manual_seed(tokens))
        ratios, same = [], True
        for _ in range(max(3, runs)):
            began = time.process_time()
            stock = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, tokens:].tolist()  # type: ignore
            between = time.process_time()
            ours = list(hw.generate(model, ids[0].tolist(), NEW, temperature=0.0))
            ratios.append((between - began) / (time.process_time() - between))
            same = same and ours == stock
        rows.append({"prompt": tokens, "speed": statistics.median(ratios), "same": same})
    lines = [f"prompt {r['prompt']}: {r['speed']:.2f} times as fast; the same tokens: {r['same']}" for r in rows]
    return {"rows": rows, "table": "\n".join(lines)}
