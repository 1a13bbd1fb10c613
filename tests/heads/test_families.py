"""Models of transformers, watched: they compute what they computed before, and every number is that of their maps."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from dense import assert_rows
from families import DECODERS, FAMILIES, V, answer, build, inputs_of, model_of, real
from helpers import watch_call
from torch import Tensor, nn

import headwise as hw
from headwise.heads.documents import listening
from headwise.models import hook
from headwise.models.sites import sites_of

MARKS = {"some": [3, 7, 11], "none": [130]}
every_family = pytest.mark.parametrize("name", FAMILIES)


def state(model: nn.Module) -> list[Any]:
    """All that a block could leave behind."""
    return [
        [
            (path, module.training, len(module._forward_pre_hooks), len(module._forward_hooks))
            for path, module in model.named_modules()
        ],
        [vars(config).get("_attn_implementation_internal") for config in configs(model)],
        [(key, parameter.requires_grad, parameter._version) for key, parameter in model.named_parameters()],
        len(hook._blocks),
        len(hook._tokens.get()),
        tf.AttentionInterface.get_interface,
        torch.get_num_threads(),
        torch.is_grad_enabled(),
    ]


def configs(model: nn.Module) -> list[Any]:
    return [module.config for module in model.modules() if hasattr(module, "config")]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal but for the order of the arithmetic: 1e-5, 84 roundings of float32, of the size of the outputs."""
    assert (actual - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))


def generate(model: Any, name: str, inputs: dict[str, Tensor], kind: str) -> Any:
    """Five new tokens, the logits of each step."""
    given = {key: value for key, value in inputs.items() if not key.startswith("decoder")}
    options: dict[str, Any] = {"cache_implementation": "static"} if kind == "static" else {}
    if FAMILIES[name].takes == "sound":
        options |= {"decoder_input_ids": inputs["decoder_input_ids"][:, :2], "attention_mask": None}
        given = {"input_features": inputs["input_features"]}
        model.generation_config.cache_implementation = options.pop("cache_implementation", None)
    with torch.no_grad():
        try:
            return tf.GenerationMixin.generate(
                model, **given, **options, max_new_tokens=5, min_new_tokens=5, do_sample=False,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        finally:
            model._cache = None
            model.generation_config.cache_implementation = None


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "dynamic") for name in (*DECODERS, "t5", "whisper")]
    + [(name, "static") for name in ("gpt2", "gemma3", "gpt_oss", "t5", "whisper")],
)
def test_generation_with_a_cache(name: str, kind: str) -> None:
    """The same tokens and logits; in decoders every row is that of one whole pass over the finished text."""
    model, inputs = model_of(name), inputs_of(name, "left")
    plain = generate(model, name, inputs, kind)
    with hw.watch(model, marks=MARKS) as seen:
        watched = generate(model, name, inputs, kind)
    assert torch.equal(watched.sequences, plain.sequences)
    for one, other in zip(watched.logits, plain.logits, strict=True):
        assert_same(one, other)
    if name not in DECODERS:
        assert {head.split(".")[0] for head in seen} == {"encoder", "decoder", "cross"}
        return
    ids = plain.sequences[:, :-1]
    n_steps = ids.shape[1] - inputs["input_ids"].shape[1]
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, n_steps, dtype=torch.long)], 1)
    with torch.no_grad(), hw.watch(model, marks=MARKS) as whole:
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    n_first = inputs["attention_mask"].sum(1).tolist()
    n_all = [n + n_steps for n in n_first]
    for head in whole:
        found, wanted = seen[head].rows, whole[head].rows
        assert whole[head].thumbnail.shape == (n_all[1], n_all[1])  # without the padding of the last document
        assert set(found) == set(wanted)
        by_document = {}
        for b in (0, 1):  # rows came call by call, and in each document by document
            start = sum(n_first[:b])
            places = [*range(start, start + n_first[b]), *range(sum(n_first) + b, sum(n_first) + 2 * n_steps, 2)]
            by_document[b] = {key: np.asarray(found[key])[places] for key in found}
        for b in (0, 1):
            part = slice(sum(n_all[:b]), sum(n_all[:b]) + n_all[b])
            expected = {key: torch.from_numpy(np.asarray(wanted[key], np.float64)[part]) for key in wanted}
            assert_rows(by_document[b], expected, ids.shape[1], f"{head}, document {b}")


@every_family
def test_gradients(name: str) -> None:
    """In training mode, with dropout 0."""
    model, inputs = copy.deepcopy(model_of(name)).train(), inputs_of(name, "right")

    def grads() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        out = answer(model(**inputs))
        kept = real(name, inputs, out)
        out = out * kept
        (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward()
        return out.detach(), {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    out, plain = grads()
    with hw.watch(model) as seen:
        watched_out, watched = grads()
    assert len(seen) > 0 and model.training
    assert (out - watched_out).abs().max() < 1e-5
    assert set(plain) == set(watched) and plain
    for key, grad in plain.items():
        assert (watched[key] - grad).abs().max() <= 1e-5 * max(1.0, float(grad.abs().max())), key


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_all_is_as_before_after_an_exception(name: str) -> None:
    model, inputs = model_of(name), inputs_of(name)
    head = "L0.H1" if name == "gpt2" else "cross.L0.H1"
    before = state(model)
    for block in (hw.watch(model), hw.ablate(model, [head])):
        with pytest.raises(MemoryError), block, torch.no_grad():
            model(**inputs)
            raise MemoryError
        assert state(model) == before


def test_blocks_see_what_other_blocks_made() -> None:
    # watch inside ablate sees what ablate made; watch around it sees what the head gave. Both orders come undone.
    model, inputs = model_of("gpt2"), inputs_of("gpt2")
    with torch.no_grad():
        plain = answer(model(**inputs))
        with hw.ablate(model, ["L1.H2"]):
            silent = answer(model(**inputs))
            with hw.watch(model) as inside:
                assert torch.equal(answer(model(**inputs)), silent)
            assert torch.equal(answer(model(**inputs)), silent)
        with hw.watch(model) as around:
            with hw.ablate(model, ["L1.H2"]):
                torch.testing.assert_close(answer(model(**inputs)), silent, rtol=0, atol=1e-6)
            n = len(around["L0.H0"].rows.entropy)
            assert torch.equal(answer(model(**inputs)), plain)
        assert torch.equal(answer(model(**inputs)), plain)
    assert inside["L1.H2"].norm == 0
    assert around["L1.H2"].norm > 0
    assert len(around["L0.H0"].rows.entropy) == 2 * n
    np.testing.assert_allclose(inside["L1.H2"].rows.entropy, around["L1.H2"].rows.entropy[:n], rtol=0, atol=1e-5)
    model, inputs = model_of("llama"), inputs_of("llama")
    with torch.no_grad(), hw.watch(model) as one, hw.watch(model) as other:
        model(**inputs)
    with torch.inference_mode(), hw.watch(model) as third:
        model(**inputs)
    for seen in (other, third):
        np.testing.assert_array_equal(seen["L1.H3"].rows.entropy, one["L1.H3"].rows.entropy)


@pytest.mark.parametrize("how", ["wrapped", "body"])
def test_a_model_inside_a_module_and_a_part_of_a_model(how: str) -> None:
    model, inputs = model_of("llama"), inputs_of("llama", "left")
    seen = watch_call(model, **inputs)

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, given: dict[str, Tensor]) -> Tensor:
            return answer(self.inner(**given))

    target = Wrapper() if how == "wrapped" else model.model
    with torch.no_grad(), hw.watch(target) as other:
        target(inputs) if how == "wrapped" else target(**inputs)
    assert list(other) == list(seen)
    for head in seen:
        for key in seen[head].rows:
            np.testing.assert_array_equal(other[head].rows[key], seen[head].rows[key])


def test_beam_search_keeps_its_tokens_apart() -> None:
    """Beams change places in the cache: what the keys' tokens are must follow, or not be claimed."""
    model = model_of("gpt2")
    ids = inputs_of("gpt2")["input_ids"][:1, :7]
    claimed: list[list[Tensor | None]] = []
    running: list[Tensor] = []

    class Record(tf.LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            running.append(input_ids.clone())
            return scores

    def note(site: Any, call: Any, documents: Any) -> None:
        if site.name == "L0":
            claimed.append([document.k_ids for document in documents])

    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    options |= {"attention_mask": torch.ones_like(ids), "logits_processor": tf.LogitsProcessorList([Record()])}
    with torch.no_grad(), listening(model, note):
        model.generate(ids, **options)
    assert len(claimed) == len(running) == 7
    for k_ids, sequences in zip(claimed, running, strict=True):
        for mine, sequence in zip(k_ids, sequences, strict=True):
            assert mine is None or mine.tolist() == sequence.tolist()


def test_float_masks_and_positional_arguments() -> None:
    """A mask of the caller's own, (B,1,T,S) in floats with -inf, and one that is no keyword."""
    model, inputs = model_of("llama"), inputs_of("llama", "left")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad(), hw.watch(model) as seen:
        expected = model(ids, mask).logits
    with torch.no_grad():
        torch.testing.assert_close(model(ids, mask).logits[0], expected[0], rtol=0, atol=1e-5)
    assert len(seen["L0.H0"].rows.entropy) == int(mask.sum())
    may = torch.ones(29, 29).tril().bool() & mask.bool()[:, None, None]
    for low in (-torch.inf, torch.finfo(torch.float32).min):
        added = torch.zeros(2, 1, 29, 29).masked_fill(~may, low)
        with torch.no_grad(), hw.watch(model) as other:
            out = model(ids, attention_mask=added, position_ids=torch.arange(29)[None]).logits
        assert (out - expected)[mask.bool()].abs().max() < 1e-5
        np.testing.assert_allclose(other["L1.H3"].rows.entropy[:29], seen["L1.H3"].rows.entropy[:29], rtol=0, atol=1e-5)


def test_what_is_not_read_beside_the_interface() -> None:
    config = tf.ResNetConfig(embedding_size=7, hidden_sizes=[11, 13], depths=[1, 1], layer_type="basic")
    model = tf.ResNetModel(config)
    for block in (hw.watch, lambda model: hw.ablate(model, ["L0.H0"])):
        with pytest.raises(hw.HeadwiseError, match=r"^ResNetModel \(resnet\) has no attention that headwise can"):
            block(model).__enter__()
    model, inputs = model_of("llama"), inputs_of("llama")
    seen = watch_call(model, **inputs, temper=3.5)
    assert len(seen) == 12
    mixed = nn.ModuleDict({"own": hw.MultiHeadAttention(30, 3), "foreign": model_of("llama")})
    assert [site.name for site in sites_of(mixed)] == ["L0", "foreign.model.layers.0.self_attn.L0", "L1"]


def test_a_part_outside_the_interface_is_watched_beside_it() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            bloom = tf.BloomConfig(vocab_size=V, hidden_size=32, n_layer=1, n_head=4)
            self.one, self.other = build("gpt2"), tf.BloomModel(bloom)

    both = Both()
    with torch.no_grad(), hw.watch(both) as seen:
        both.one(**inputs_of("gpt2"))
    alone = list(seen)
    with torch.no_grad(), hw.watch(both) as seen:
        both.one(**inputs_of("gpt2"))
        both.other(inputs_of("gpt2")["input_ids"])
    assert list(seen) == [*alone, *(f"other.h.0.self_attention.L0.H{h}" for h in range(4))]


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "whisper", "vit"])
def test_maps_are_kept_where_they_are_asked_for(name: str) -> None:
    """A watched model is the model: with `output_attentions` its eager functions give their maps as they did."""
    model, inputs = build(name), inputs_of(name)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        plain = model(**inputs, output_attentions=True)
        with hw.watch(model) as seen:
            watched = model(**inputs, output_attentions=True)
    key = "attentions" if "attentions" in plain else "decoder_attentions"
    assert all(torch.equal(x, y) for x, y in zip(plain[key], watched[key], strict=True)) and len(seen)
