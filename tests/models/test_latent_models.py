"""A GPT whose heads share a latent (MLA): watched, silenced, priced, written from a cache; refused where it must be."""

from typing import Any

import pytest
import torch
import transformers as tf
from cases import refuses_table
from small_models import tiny

import headwise as hw
from headwise.corpus.tokens import Tokens
from headwise.gpt.generate import generate
from headwise.gpt.gpt import GPT
from headwise.gpt.run import Settings
from headwise.heads.steps import head_steps
from headwise.models.hook import attach
from headwise.models.pack import pack_model
from headwise.models.sites import sites_of
from headwise.models.weights import family_of, read_layers
from headwise.records import Call

pytestmark = pytest.mark.usefixtures("no_gradients")

LATENT: dict[str, Any] = {"n_kv_heads": None, "latent_dim": 7, "rope_dim": 2, "q_latent_dim": 5}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])


@pytest.fixture
def model() -> GPT:
    made: GPT = tiny("llama", **LATENT)
    return made


def test_it_is_watched_as_heads_with_keys_of_their_own(model: GPT) -> None:
    calls: list[Any] = []
    model.blocks[1].attention.watchers.append(calls.append)
    with hw.watch(model) as seen:
        logits = model(IDS)
    model.blocks[1].attention.watchers.clear()
    assert torch.equal(model(IDS), logits)
    weights = hw.trace(*calls[0][1:4], mask=hw.Causal()).weights[0].double()
    assert calls[0].k.shape == (1, 6, 11, 4) and calls[0].v.shape == (1, 6, 11, 4)
    for head in range(6):
        found = seen[f"L1.H{head}"]
        assert found.entropy == pytest.approx(float(torch.special.entr(weights[head]).sum(-1).mean()), abs=1e-5)
        assert found.previous == pytest.approx(float(weights[head].diagonal(-1).sum()) / 11, abs=1e-5)


def test_it_is_watched_while_it_writes(model: GPT) -> None:
    """The absorbed step is told in keys and values, and its answer is the one of the step that nobody watches."""
    answers, calls = [], []
    for watchers in ([], [calls.append]):
        caches = model.new_caches()
        model(IDS[:, :10], caches)
        model.blocks[0].attention.watchers = watchers
        answers.append(model(IDS[:, 10:], caches))
    assert torch.equal(*answers)
    spelled = hw.attend(calls[0].q, calls[0].k, calls[0].v)
    torch.testing.assert_close(spelled, calls[0].out, rtol=1e-5, atol=1e-5)


def test_heads_and_matrices_of_a_latent(model: GPT) -> None:
    with hw.ablate(model, ["L0.H4"], how="zero"):
        silenced = model(IDS)
    model.blocks[0].attention.heads[4].wo = torch.zeros(24, 4)
    torch.testing.assert_close(model(IDS), silenced)
    site, head = sites_of(model)[1], model.blocks[1].attention.heads[2]
    for name in "qkv":
        assert torch.equal(site.weights(name)[8:12], getattr(head, f"w{name}"))
    whole = [3, 1]
    for _ in range(8):
        whole.append(int(model(torch.tensor([whole]))[0, -1].argmax()))
    assert list(generate(model, [3, 1], 8, temperature=0.0)) == whole[2:]
    price, caches = hw.price(model, dtype="fp32"), model.new_caches()
    assert price.parameters.total == model.n_parameters
    model(IDS, caches)
    assert sum(cache.nbytes for cache in caches) == 11 * 2 * (7 + 2) * 4 == 11 * price.cache.bytes_per_token
    assert pack_model(model, Tokens.characters("abc", boundary=True)) == {"reason": "latent"}


def test_what_a_latent_cannot_have_is_refused(model: GPT) -> None:
    def settings(preset: str = "verbs", **shape: Any) -> None:
        Settings(preset=preset, shape={"latent_dim": 16, **shape}).resolve()

    needed = {"family_of": family_of, "read_layers": read_layers, "head_steps": head_steps}
    refuses_table("latent_models", globals() | needed | {"model": model, "settings": settings})


@pytest.mark.parametrize("q_lora_rank", [11, None])
def test_the_matrices_of_deepseek_are_what_its_heads_read(q_lora_rank: int | None) -> None:
    """But for what the norms divide by, one number a token: of values, of contents of keys, of contents of queries."""
    fields = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 3}
    fields |= {"vocab_size": 61, "intermediate_size": 37, "first_k_dense_replace": 1, "max_position_embeddings": 97}
    widths = {"kv_lora_rank": 13, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 7}
    model = tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**fields, **widths, q_lora_rank=q_lora_rank)).eval()
    for name, gain in model.named_parameters():
        if "a_layernorm" in name:
            gain.uniform_(0.5, 1.5)
    (site,) = sites_of(model)
    read, calls = list[torch.Tensor](), list[Call]()
    site.module.register_forward_pre_hook(lambda *call: read.append(call[2]["hidden_states"]), with_kwargs=True)
    with attach({site: calls.append}):
        model(IDS)
    (x,), (call,) = read, calls
    for name, given, width in (("v", call.v, 7), ("k", call.k, 6), ("q", call.q, 6)):
        made = (x @ site.weights(name).T).unflatten(2, (3, -1)).transpose(1, 2)[..., :width]
        given = given[..., :width]
        factor = (made * given).sum((1, 3), keepdim=True) / given.square().sum((1, 3), keepdim=True)
        torch.testing.assert_close(made, given * factor, rtol=1e-4, atol=1e-6)
    assert hw.survey(model, IDS.tolist(), controls=False)["L0.H0"].copying.n == 1


def test_a_latent_takes_the_place_of_what_a_preset_has_instead() -> None:
    spec = Settings(shape={"latent_dim": 16}).resolve()[1].attention  # of the preset verbs, which has qk-norm
    assert (spec.latent_dim, spec.rope_dim, spec.qk_norm) == (16, 4, False)
