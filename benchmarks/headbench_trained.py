"""Models of the bench that were trained: all heads but a chosen few are held shut, so that those did the work."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from benchmarks.headbench_models import CONTEXT, TOKENS, Known, Task
from benchmarks.headbench_tasks import TASKS

STEPS, BATCH, PATIENCE = 1500, 64, 20
NOISE = 0.02  # of what a head that was shut may write once the model is trained


@dataclass(frozen=True)
class Lesson:
    task: str
    circuit: tuple[str, ...]  # the heads that may write
    form: str
    shape: tuple[tuple[str, object], ...]


ROPE = (("n_kv_heads", 2), ("position", "rope"))
LEARNED = (("position", "learned"),)
NORMED = (("n_kv_heads", 1), ("position", "rope"), ("qk_norm", True))
MLA = (("latent_dim", 32), ("rope_dim", 4), ("head_dim", 16))
LESSONS = (
    Lesson("previous token", ("L0.H2",), "trained, GQA, RoPE", ROPE),
    Lesson("previous token", ("L1.H0",), "trained, MHA, learned positions", LEARNED),
    Lesson("successor", ("L1.H1",), "trained, MQA, RoPE, qk-norm", NORMED),
    Lesson("successor", ("L0.H3",), "trained, MLA, RoPE", MLA),
    Lesson("relation, English and Spanish", ("L0.H1", "L1.H2"), "trained, GQA, RoPE", ROPE),
    Lesson("relation, English and Spanish", ("L0.H3", "L1.H1"), "trained, MQA, RoPE, qk-norm", NORMED),
)


def trained(number: int, pairs: int = 2) -> Known:
    lesson = LESSONS[number]
    task = next(task for task in TASKS if task.name == lesson.task)
    torch.manual_seed(number)
    shape = {"n_layers": 2, "n_heads": 4, "d_model": 64, "d_ff": 128, **dict(lesson.shape)}
    model = hw.GPT(hw.GPTConfig(vocab_size=len(TOKENS), context=CONTEXT, **shape))
    shut = _shut(model, lesson.circuit)
    _taught(model, task, shut, random.Random(number))
    with torch.no_grad():
        for block, closed in zip(model.blocks, shut, strict=True):
            block.attention.o_proj.weight += closed * NOISE * torch.randn_like(block.attention.o_proj.weight)
    rng = random.Random(9000 + number)
    return Known(
        f"{task.name} ({lesson.form})", task.name, lesson.form, model.eval(), [task.pair(rng) for _ in range(pairs)],
        frozenset(lesson.circuit), frozenset(),
    )  # fmt: skip


def _shut(model: hw.GPT, circuit: Sequence[str]) -> list[Tensor]:
    """Of each layer 1 at the columns of W_O that belong to heads that may not write; they are 0 from here on."""
    masks = []
    for number, block in enumerate(model.blocks):
        heads = block.attention.spec.n_heads
        closed = torch.tensor([f"L{number}.H{h}" not in circuit for h in range(heads)])
        mask = closed.repeat_interleave(block.attention.spec.value_dim).float()[None]
        block.attention.o_proj.weight.data *= 1 - mask
        block.attention.o_proj.weight.register_hook(lambda slope, mask=mask: slope * (1 - mask))
        masks.append(mask)
    return masks


def _taught(model: hw.GPT, task: Task, shut: Sequence[Tensor], rng: random.Random) -> None:
    """Until it was right on so many batches in a row, or the steps are over."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS, pct_start=0.1)
    right = 0
    for _ in range(STEPS):
        drawn = [task.pair(rng) for _ in range(BATCH // 2)]
        ids = torch.tensor([text for pair in drawn for text in (pair.clean, pair.corrupted)])
        answers = torch.tensor([answer for pair in drawn for answer in (pair.answer, pair.other)])
        logits = model(ids, last_only=True)[:, -1]
        right = right + 1 if bool((logits.argmax(1) == answers).all()) else 0
        if right >= PATIENCE:
            return
        optimizer.zero_grad()
        F.cross_entropy(logits, answers).backward()
        optimizer.step()
        schedule.step()
