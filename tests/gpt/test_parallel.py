"""Our GPT under torch's own DDP and fully_shard: two processes learn what one learns, and are watched."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import together
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import headwise as hw

pytestmark = pytest.mark.slow
STEPS = 5


def made() -> Any:
    torch.manual_seed(5)
    return hw.GPT(
        hw.GPTConfig(vocab_size=19, context=13, n_layers=2, n_heads=6, n_kv_heads=2, d_model=24, qk_norm=True)
    )


def learned(model: Any, rows: slice) -> tuple[list[float], dict[str, float]]:
    """The losses of some steps on rows of the same 4 texts, and the entropy of each head afterwards on one text."""
    ids = torch.randint(19, (4, 12), generator=torch.Generator().manual_seed(1))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(STEPS):
        loss = F.cross_entropy(model(ids[rows, :-1]).flatten(0, 1), ids[rows, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad(), hw.watch(model) as seen:
        model(ids[:1, :-1])
    return losses, {name: seen[name].entropy for name in seen}


def both(folder: Path) -> None:
    """A target of `together`: what each of two processes sees, in a file."""
    dist.init_process_group("gloo")
    rank, told = dist.get_rank(), {}
    shared = slice(2 * rank, 2 * rank + 2)  # of a mean over all texts the mean of both halves
    told["ddp"] = learned(DistributedDataParallel(made()), shared)
    model = made()
    for block in [*model.blocks, model]:
        fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    told["fsdp"] = learned(model, shared)
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def test_two_processes_learn_and_are_watched_as_one(tmp_path: Path) -> None:
    ended = together(tmp_path, 2, both, tmp_path)
    assert [each.code for each in ended] == [0, 0], ended[0].err + ended[1].err
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    losses, entropies = learned(made(), slice(4))
    for way in ("ddp", "fsdp"):
        (a, seen), (b, also) = first[way], second[way]
        assert [(x + y) / 2 for x, y in zip(a, b, strict=True)] == pytest.approx(losses, abs=1e-5)
        assert len(seen) == 12
        assert seen == pytest.approx(entropies, abs=1e-4) and also == pytest.approx(seen, abs=1e-6)
