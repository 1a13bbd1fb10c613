"""Watching again and again, with errors inside, in threads, beside forks: memory is flat and no hook is left."""

import gc
import os
import random
import resource
import threading
from pathlib import Path

import torch

import headwise as hw
from headwise.gpt.gpt import GPT, GPTConfig

CYCLES = 25  # of a case
GROWTH = 48 << 20  # bytes that the process may gain over a whole campaign
WARM = 10  # cases before memory is compared

model = GPT(GPTConfig(vocab_size=19, context=23, n_layers=2, n_heads=3, d_model=24)).eval()
memory: list[int] = []


def case(seed: int, place: Path) -> str:
    rng = random.Random(seed)
    kind = rng.choice(("plain", "error", "threads", "nested", "fork", "garbage"))
    ids = torch.randint(0, 19, (1, rng.choice((2, 7, 19))))
    with torch.no_grad():
        before = model(ids)
        for _ in range(CYCLES):
            _cycle(kind, ids)
        if not torch.equal(model(ids), before):
            raise AssertionError(f"after {kind} the model gives something else")
    gc.collect()
    for module in model.modules():
        if getattr(module, "watchers", ()) or module._forward_hooks or module._forward_pre_hooks:
            raise AssertionError(f"after {kind} a hook is left on {type(module).__name__}")
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    memory.append(pages * resource.getpagesize())
    if len(memory) > WARM and memory[-1] > max(memory[:WARM]) + GROWTH:
        raise AssertionError(f"memory grew from {max(memory[:WARM]) >> 20} to {memory[-1] >> 20} MiB")
    return kind


def _cycle(kind: str, ids: torch.Tensor) -> None:
    if kind == "error":
        try:
            with hw.watch(model), hw.ablate(model, ["L0.H1"]):
                model(ids)
                raise KeyError("inside")
        except KeyError:
            return
    if kind == "threads":
        _threads(ids)
    elif kind == "nested":
        first, second = hw.watch(model), hw.ablate(model, ["L1.H0"])
        first.__enter__()
        second.__enter__()
        model(ids)
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
    elif kind == "fork":
        with hw.watch(model):
            model(ids)
            if (pid := os.fork()) == 0:
                model(ids)
                os._exit(0)
            if os.waitpid(pid, 0)[1]:
                raise AssertionError("a fork inside a watched block died")
    elif kind == "garbage":
        block = hw.watch(model)
        block.__enter__()
        model(ids)
        del block  # left to the garbage collector
        gc.collect()
    else:
        with hw.watch(model) as seen:
            model(ids)
        if len(seen["L0.H0"].rows.entropy) != ids.shape[1]:
            raise AssertionError("a watched call was counted twice or not at all")


def _threads(ids: torch.Tensor) -> None:
    counts: list[int] = []

    def work(times: int) -> None:
        with torch.no_grad(), hw.watch(model) as seen:
            for _ in range(times):
                model(ids)
        counts.append(len(seen["L0.H0"].rows.entropy) - times * ids.shape[1])

    threads = [threading.Thread(target=work, args=(times,)) for times in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if counts != [0, 0, 0]:
        raise AssertionError(f"threads that watch one model count {counts} rows too many")
