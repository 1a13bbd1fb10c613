"""Tensor parallelism by torch's own plans: each of two processes holds some heads, and the answer is the whole one."""

import os
import socket
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import headwise as hw

WORLD, B, T = 2, 2, 7
QUERIES, KEYS = ("q_proj",), ("k_proj", "v_proj")
LAYERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {  # a layer, and what is cut by rows
    "plain": ({}, QUERIES + KEYS),
    "groups": ({"n_kv_heads": 2, "rope": hw.RoPE(), "qk_norm": True, "value_dim": 5}, QUERIES + KEYS),
    "one key/value head": ({"n_kv_heads": 1, "rope": hw.RoPE()}, QUERIES),
    "heads of their own": ({"n_kv_heads": 4, "kv_index": (0, 1, 1, 2, 3, 3), "sink": True}, QUERIES),
    "a mask for each head": ({"mask": hw.Causal() & hw.Alibi(), "sink": True, "softcap": 1.3}, QUERIES + KEYS),
    "biases": ({"q_bias": True, "kv_bias": True, "out_bias": True}, QUERIES + KEYS),
}


def split(layer: Any, names: tuple[str, ...], local: bool) -> Any:
    plan = {name: ColwiseParallel(use_local_output=local) for name in names}
    parallelize_module(layer, init_device_mesh("cpu", (WORLD,)), {**plan, "o_proj": RowwiseParallel()})
    return layer


def near(ours: Tensor, theirs: Tensor, what: str) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}")


def layers(local: bool) -> None:
    gate = torch.linspace(-1, 2, 6).double()
    for name, (options, names) in LAYERS.items():
        torch.manual_seed(0)
        whole = hw.MultiHeadAttention(48, 6, **{"mask": hw.Causal(), **options}).double().eval()
        if whole.sink is not None:
            whole.sink.data = torch.linspace(-1, 1, 6).double()
        parts = hw.MultiHeadAttention.from_spec(whole.spec).double().eval()
        parts.load_state_dict(whole.state_dict())
        split(parts, names, local)
        x, cache = torch.randn(B, T, 48).double(), hw.KVCache()
        with torch.no_grad():
            near(parts(x), whole(x), name)
            near(parts(x, gate=gate), whole(x, gate=gate), f"{name}, gate")
            steps = torch.cat([parts(x[:, n : n + 1], cache=cache) for n in range(T)], 1)
            near(steps, whole(x), f"{name}, cache")
            with hw.watch(whole) as expected:
                whole(x)
            with hw.watch(parts) as seen:
                parts(x)
        for head in seen:
            assert seen[head].entropy == pytest.approx(expected[head].entropy, abs=1e-6), (name, head)
        rank = dist.get_rank()
        assert list(seen) == [f"L0.H{n}" for n in range(3 * rank, 3 * rank + 3)], (name, list(seen))
        with torch.no_grad(), hw.ablate(parts, [f"L0.H{3 * rank}"]):
            silenced = parts(x)
        near(silenced, whole(x, gate=torch.tensor([0, 1, 1, 0, 1, 1]).double()), f"{name}, silenced")


def gradients(local: bool) -> None:
    torch.manual_seed(0)
    whole = hw.MultiHeadAttention(48, 6, 2, mask=hw.Causal()).double()
    parts = hw.MultiHeadAttention.from_spec(whole.spec).double()
    parts.load_state_dict(whole.state_dict())
    split(parts, QUERIES + KEYS, local)
    x = torch.randn(B, T, 48).double()
    for layer in (whole, parts):
        layer(x).square().sum().backward()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        held: Any = getattr(parts, name).weight.grad
        near(held.full_tensor(), getattr(whole, name).weight.grad, name)


def latent(local: bool) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"latent_dim": 13, "rope_dim": 4, "mask": hw.Causal()}
    whole, parts = (hw.MultiHeadLatentAttention(48, 6, **options).double().eval() for _ in range(2))
    parts.load_state_dict(whole.state_dict())
    split(parts, ("q_proj", "kv_up"), local)
    x, cache = torch.randn(B, T, 48).double(), hw.KVCache()
    with torch.no_grad():
        near(parts(x), whole(x), "latent")
        near(torch.cat([parts(x[:, :6], cache=cache), parts(x[:, 6:], cache=cache)], 1), whole(x), "latent, absorbed")


def refusals(local: bool) -> None:
    x = torch.randn(B, T, 48)
    for options, words in (
        ({"n_kv_heads": 1}, "this process holds 4 features of heads that are 8 wide"),
        ({"n_kv_heads": 4, "kv_index": (0, 2, 0, 3, 1, 2)}, "leave k_proj and v_proj whole"),
    ):
        parts = split(hw.MultiHeadAttention(48, 6, **options), QUERIES + KEYS, local)
        try:
            parts(x)
        except hw.HeadwiseError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"{options} is not refused")


def library(folder: Path) -> None:
    """A model that transformers splits by its own plan."""
    import transformers
    from transformers.integrations import accelerate

    accelerate.is_accelerate_available = lambda *_: True  # it asks for it, and does without
    config: Any = transformers.distributed.DistributedConfig(tp_plan="auto")
    whole = transformers.LlamaForCausalLM.from_pretrained(folder)
    parts: Any = transformers.LlamaForCausalLM.from_pretrained(folder, distributed_config=config)
    ids, rank = torch.arange(3, 14)[None], dist.get_rank()
    with torch.no_grad(), hw.watch(whole) as expected:
        answer = whole(ids).logits
    with torch.no_grad(), hw.watch(parts) as seen:
        torch.testing.assert_close(parts(ids).logits, answer)
    assert list(seen) == [f"L{layer}.H{3 * rank + n}" for layer in range(2) for n in range(3)], list(seen)
    for head in seen:
        assert seen[head].entropy == pytest.approx(expected[head].entropy, abs=1e-5), head
        assert seen[head].norm == pytest.approx(expected[head].norm, abs=1e-5), head


def work(rank: int, port: int, out: str, local: bool) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    checks: list[Callable[[], None]] = [partial(check, local) for check in (layers, gradients, latent, refusals)]
    if local:
        checks.append(partial(library, Path(out, "llama")))
    for check in checks:
        try:
            check()
        except BaseException:
            Path(out, str(rank)).write_text(traceback.format_exc())
            os._exit(1)  # the other process would wait for this one
    dist.barrier()
    dist.destroy_process_group()


def save_llama(folder: Path) -> None:
    import transformers  # the processes of the other case need none of it

    sizes = {"hidden_size": 48, "intermediate_size": 62, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=97, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # larger weights, so that heads differ
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    model.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("local", [True, False])
def test_heads_are_split_over_processes(tmp_path: Path, local: bool) -> None:
    if local:
        save_llama(tmp_path / "llama")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        mp.spawn(work, (port, str(tmp_path), local), WORLD)
    except Exception:
        said = [path.read_text() for path in sorted(tmp_path.glob("[01]"))]
        raise AssertionError("\n".join(said)) from None
