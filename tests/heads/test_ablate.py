"""Heads silenced: the model is then the one whose W_O has zeros there, or reads the head's mean, in every mode."""

import copy
import re
import threading
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from cases import refuses, refuses_table
from families import DECODERS, FAMILIES, answer, gpt_of, inputs_of, model_of, real
from small_models import past
from torch import Tensor, nn

import headwise as hw
from headwise.gpt.presets import PRESETS
from headwise.models.sites import sites_of

V, T = 17, 13
HEADS = {
    "t5": ["encoder.L1.H2", "decoder.L0.H4", "cross.L1.H0", "cross.L1.H3"],
    "whisper": ["encoder.L1.H4", "decoder.L2.H0", "cross.L0.H1", "cross.L0.H2"],
}
every_family = pytest.mark.parametrize("name", FAMILIES)


def heads_of(name: str) -> list[str]:
    return HEADS.get(name, ["L0.H1", "L1.H0", "L1.H2"])


def projections(name: str, model: nn.Module) -> dict[str, nn.Module]:
    """Site name -> the module of W_O, found by the path alone."""
    found = {}
    for path, module in model.named_modules():
        if re.search(FAMILIES[name].w_o, path):
            number = next(part for part in path.split(".") if part.isdigit())
            cross = "EncDecAttention" in path or "encoder_attn" in path
            side = "cross." if cross else "decoder." if "decoder" in path else "encoder."
            found[f"{side if name in HEADS else ''}L{number}"] = module
    return found


def columns(module: nn.Module, head: int, n_heads: int, of: str = "weight") -> Tensor:
    """The part of W_O that reads one head, to write to; `of` its gradient, "weight.grad"."""
    matrix = attrgetter(of)(module)
    matrix = matrix.T if type(module).__name__ == "Conv1D" else matrix
    width = matrix.shape[1] // n_heads
    part: Tensor = matrix[:, head * width : (head + 1) * width]
    return part


def without(name: str, heads: list[str]) -> Any:
    """A copy of the model in which W_O does not read those heads."""
    model = copy.deepcopy(model_of(name))
    modules = projections(name, model)
    counts = {site.name: site.n_heads for site in sites_of(model)}
    with torch.no_grad():
        for head in heads:
            site, number = head.rsplit(".H", 1)
            columns(modules[site], int(number), counts[site]).zero_()
    return model


@every_family
def test_gradients_are_those_of_the_model_without(name: str) -> None:
    """In training, with dropout 0, as is the loss. Of everything but the columns themselves, which get none."""
    heads, inputs = heads_of(name), inputs_of(name, "right")
    model, other = copy.deepcopy(model_of(name)).train(), without(name, heads).train()
    with hw.ablate(model, heads):
        out = loss(name, model, inputs)
        out.backward()
    expected = loss(name, other, inputs)
    expected.backward()
    assert model.training and out.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-4)
    counts = {site.name: site.n_heads for site in sites_of(model)}
    for head in heads:
        site, number = head.rsplit(".H", 1)
        both = (projections(name, each)[site] for each in (model, other))
        silent, unread = (columns(module, int(number), counts[site], "weight.grad") for module in both)
        assert not silent.any()
        unread.zero_()
    for (key, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        if one.grad is None or two.grad is None:
            assert one.grad is two.grad is None
            continue
        assert (one.grad - two.grad).abs().max() <= 1e-5 * max(1.0, float(two.grad.abs().max())), key


def loss(name: str, model: Any, inputs: dict[str, Tensor]) -> Tensor:
    out = answer(model(**inputs))
    out = out * real(name, inputs, out)
    return (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum()


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "dynamic") for name in DECODERS), ("gemma3", "static"), ("gpt_oss", "static")]
)
def test_generation(name: str, kind: str) -> None:
    heads, inputs = heads_of(name), inputs_of(name, "left")
    model, other = model_of(name), without(name, heads)
    options: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    options |= {"cache_implementation": "static"} if kind == "static" else {}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    with torch.no_grad():
        expected = other.generate(**inputs, **options)
        with hw.ablate(model, heads):
            found = model.generate(**inputs, **options)
    assert torch.equal(found.sequences, expected.sequences)
    for one, two in zip(found.logits, expected.logits, strict=True):
        assert (one - two).abs().max() < 1e-5


def mean_by_hand(name: str, model: Any, inputs: Any, heads: list[str], rows: dict[str, Tensor]) -> Any:
    """The answer with each head replaced, before W_O, by its mean over the call's real rows."""
    hooks = []
    counts = {site.name: site.n_heads for site in sites_of(model)}
    for site, module in projections(name, model).items():
        numbers = [int(head.rsplit(".H", 1)[1]) for head in heads if head.rsplit(".H", 1)[0] == site]

        def hook(module: nn.Module, args: tuple[Tensor, ...], site: str = site, numbers: Any = numbers) -> Any:
            joined = args[0].clone()
            parts = joined.unflatten(-1, (counts[site], -1))
            which = rows.get(site, torch.ones(parts.shape[:2], dtype=torch.bool))
            for h in numbers:
                parts[..., h, :] = parts[..., h, :][which].mean(0)
            return (parts.flatten(-2),)

        if numbers:
            hooks.append(module.register_forward_pre_hook(hook))
    try:
        return answer(model(**inputs))
    finally:
        for one in hooks:
            one.remove()


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@every_family
def test_mean_over_real_rows(name: str, padding: str) -> None:
    """Later layers are averaged in the model that is silenced already."""
    model, heads, inputs = model_of(name), heads_of(name), inputs_of(name, padding)
    rows = {}
    for site in projections(name, model):
        mask = inputs.get("decoder_attention_mask" if site.startswith(("decoder", "cross")) else "attention_mask")
        if mask is not None:
            rows[site] = mask.bool()
    with torch.no_grad():
        expected = mean_by_hand(name, model, inputs, heads, rows)
        with hw.ablate(model, heads, how="mean"):
            out = answer(model(**inputs))
    assert ((out - expected) * real(name, inputs, out)).abs().max() < 1e-5


@pytest.mark.parametrize("end", [18, 20])
def test_a_mean_of_a_cached_step_is_refused(end: int) -> None:
    model, ids = model_of("gpt2"), inputs_of("gpt2")["input_ids"]
    said = r"^how='mean' in a step of \d+ tokens with \d+ in the cache has too"
    with torch.no_grad():
        held = past(model(input_ids=ids[:, :17]))
        with pytest.raises(hw.HeadwiseError, match=said), hw.ablate(model, ["L0.H1"], how="mean"):
            model(input_ids=ids[:, 17:end], **held)


@pytest.mark.parametrize("preset", PRESETS)
def test_our_models(preset: str) -> None:
    """As with columns of zeros, whole and with a cache; and as with gate 0."""
    model = gpt_of(preset)
    other = copy.deepcopy(model)
    ids = torch.randint(V, (2, T))
    with torch.no_grad():
        for layer, heads in ((0, (1, 4)), (1, (5,))):
            for h in heads:
                other.blocks[layer].attention.o_proj.weight[:, 4 * h : 4 * h + 4] = 0
        expected = other(ids)
        with hw.ablate(model, ["L1.H5", "L0.H1", "L0.H4", "L0.H1"]):
            close = 1e-5 * max(1.0, float(expected.abs().max()))
            assert (model(ids) - expected).abs().max() < close
            caches = model.new_caches()
            steps = [model(part, caches) for part in ids.split([5, 1, 7], 1)]
        assert (torch.cat(steps, 1) - expected).abs().max() < close
        layer = model.blocks[1].attention
        x, gate = torch.randn(2, T, 24), torch.ones(6)
        gate[3] = 0
        with hw.ablate(layer, ["L0.H3"]):
            assert torch.equal(layer(x), layer(x, gate=gate))


def test_where_there_are_two_stacks_a_bare_layer_is_no_name() -> None:
    model, said = model_of("t5"), r"^no head 'coder\.L1\.H2'; did you mean (en|de)coder\.L1\.H2 or"
    refuses(lambda: hw.ablate(model, ["coder.L1.H2"]).__enter__(), said)
    sites = {site.name: (site.n_heads, site.cross) for site in sites_of(model)}
    expected = {"encoder": False, "decoder": False, "cross": True}
    assert sites == {f"{side}.L{n}": (5, cross) for side, cross in expected.items() for n in (0, 1)}
    assert [site.head(2) for site in sites_of(model)][:2] == ["encoder.L0.H2", "encoder.L1.H2"]


def test_no_gradient_runs_through_a_mean() -> None:
    layer = gpt_of("llama").blocks[0].attention
    with hw.ablate(layer, [f"L0.H{h}" for h in range(6)], how="mean"):
        out = layer(torch.randn(1, T, 24))
    out.sum().backward()
    assert layer.o_proj.weight.grad is not None and layer.o_proj.weight.grad.any()
    assert all(p.weight.grad is None or not np.any(p.weight.grad.numpy()) for p in (layer.q_proj, layer.v_proj))


def test_a_compiled_model_is_silenced_and_watched() -> None:
    """Its code was made without us, so nothing in it would call us; by whatever name it is called."""
    model, inputs, heads = copy.deepcopy(model_of("llama")), inputs_of("llama"), ["L0.H1"]
    with torch.no_grad():
        plain = answer(model(**inputs))
        with hw.ablate(model, heads):
            expected = answer(model(**inputs))
        compiled = torch.compile(model, backend="eager")
        compiled(**inputs)
        for target in (model, compiled):
            with hw.ablate(target, heads), hw.watch(target) as seen:
                assert torch.equal(answer(compiled(**inputs)), expected)
            assert len(seen) == sum(site.n_heads for site in sites_of(model))
        model.forward = torch.compile(model.forward, backend="eager")
        model(**inputs)
        with hw.ablate(model, heads):
            assert torch.equal(answer(model(**inputs)), expected)
        assert torch.equal(answer(compiled(**inputs)), plain)
    torch.compiler.reset()


def test_a_block_in_which_no_listed_head_was_reached_says_so() -> None:
    """An ablation without effect must not pass for a head without effect."""
    ours, foreign = nn.ModuleList([hw.MultiHeadAttention(30, 3) for _ in range(2)]), model_of("llama")
    x = torch.randn(1, 7, 30)
    for block in (lambda: hw.ablate(ours, ["L1.H0"]), lambda: hw.watch(ours), lambda: hw.ablate(foreign, ["L0.H1"])):
        said = r"^no head of L[01](, L1)? was reached inside this block; call the model in it"
        with pytest.raises(hw.HeadwiseError, match=said), block():
            pass
        with pytest.raises(ZeroDivisionError), block():  # it is not hidden behind ours
            raise ZeroDivisionError
    with pytest.raises(hw.HeadwiseError, match=r"^no head of L1 was"), hw.ablate(ours, ["L1.H0"]):
        ours[0](x)  # another one
    with pytest.raises(hw.HeadwiseError, match="in the thread that opened it"), hw.ablate(ours, ["L0.H0"]):
        thread = threading.Thread(target=ours[0], args=(x,))
        thread.start()
        thread.join()
    with hw.ablate(ours, []):
        pass


@pytest.mark.parametrize("change", ["add", "scale"])
@torch.no_grad()
def test_steering_is_a_hook_before_w_o(change: str) -> None:
    """Grouped heads: head 4 reads key/value head 1, and only its own columns of W_O's input move."""
    model, inputs = model_of("llama"), inputs_of("llama")
    projection: Any = projections("llama", model)["L1"]
    width = projection.weight.shape[1] // 6
    vector = torch.randn(width, generator=torch.Generator().manual_seed(7))

    def hook(module: nn.Module, args: Any) -> Any:
        joined = args[0].clone()
        part = joined[..., 4 * width : 5 * width]
        part.copy_(part + vector if change == "add" else part * 0.2)
        return (joined,)

    handle = projection.register_forward_pre_hook(hook)
    expected = answer(model(**inputs))
    handle.remove()
    ways = [vector, vector.numpy(), vector.tolist()] if change == "add" else [0.2, torch.tensor(0.2), np.float32(0.2)]
    for way in ways:
        with hw.steer(model, {"L1.H4": way}):
            assert torch.equal(answer(model(**inputs)), expected)
    assert not torch.equal(answer(model(**inputs)), expected)


def test_what_cannot_be_added_is_refused() -> None:
    def steered(changes: Any) -> None:
        model = model_of("llama")
        with hw.steer(model, changes), torch.no_grad():
            model(**inputs_of("llama"))

    refuses_table("steering", globals() | {"steered": steered})


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_a_head_gives_what_it_gives_in_another_text(name: str) -> None:
    """Each document of a batch gets the rows of a text of its own; the other heads stay."""
    model, head = model_of(name), heads_of(name)[0]
    generator = torch.Generator().manual_seed(5)
    ids, texts = (torch.randint(3, V, (3, n), generator=generator) for n in (T, T + 4))
    site, _, number = head.rpartition(".H")
    module, h = projections(name, model)[site], int(number)
    read: list[Tensor] = []
    hook = module.register_forward_hook(lambda m, args, out: read.append(args[0].detach().clone()))
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "t5" else {})
    model(**inputs)
    with hw.ablate(model, [head], how="resample", texts=texts[:2]):
        model(**inputs)
    hook.remove()
    before, first, second, after = read  # the model reads the texts when the block opens
    E = before.shape[-1] // next(each.n_heads for each in sites_of(model) if each.name == site)
    part = slice(h * E, h * E + E)
    for b, text in enumerate((first, second, first)):
        assert torch.equal(after[b, :, part], text[0, :T, part])
    others = [i for i in range(before.shape[-1]) if not h * E <= i < h * E + E]
    assert torch.equal(after[..., others], before[..., others]) and not torch.equal(after, before)


def test_bad_requests_of_resampling_and_of_functions() -> None:
    refuses_table("resampling", globals() | {"model": gpt_of(), "ids": torch.ones(1, T, dtype=torch.long)})


def run_in(block: Any, model: nn.Module, ids: Tensor) -> None:
    with block:
        model(ids)
