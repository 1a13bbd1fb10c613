"""Questions to a model: one answer each, the same for ours and for transformers' models."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from cases import refuses
from small_models import shaken, tiny
from torch import Tensor, nn

import headwise as hw
from headwise.models import ask

V = 19
SIZES: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 20, "intermediate_size": 23, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 31,
}  # fmt: skip
BERT = tf.BertConfig(**SIZES)
LLAMA = tf.LlamaConfig(**SIZES)
T5 = tf.T5Config(vocab_size=V, d_model=20, d_kv=5, d_ff=23, num_layers=2, num_heads=2, decoder_start_token_id=0)


@pytest.fixture(params=["ours", "llama", "gpt2"])
def model(request: Any) -> nn.Module:
    torch.manual_seed(0)
    if request.param == "ours":
        return tiny("llama", vocab_size=V).eval()
    if request.param == "gpt2":
        config = tf.GPT2Config(vocab_size=V, n_embd=20, n_layer=2, n_head=2, n_positions=31)
        return tf.GPT2LMHeadModel(config).eval()
    return tf.LlamaForCausalLM(LLAMA).eval()


def noticing_bert() -> nn.Module:
    """A later token moves its logits by some 9 roundings of bfloat16: those of a trained ALBERT move by 10."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 3, "intermediate_size": 128}
    return tf.BertForMaskedLM(tf.BertConfig(vocab_size=997, **sizes))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: tf.LlamaForCausalLM(LLAMA), "next"),
        (lambda: tf.BertLMHeadModel(tf.BertConfig(**SIZES, is_decoder=True)), "next"),
        (lambda: type("Mine", (tf.LlamaForCausalLM,), {})(LLAMA), "next"),
        (lambda: tf.MambaForCausalLM(tf.MambaConfig(vocab_size=V, hidden_size=20, num_hidden_layers=1)), "next"),
        (lambda: tf.BertForMaskedLM(BERT), "masked"),
        (lambda: noticing_bert().bfloat16(), "masked"),
        (lambda: tf.BertLMHeadModel(BERT), "masked"),  # of the class for causal models, it reads both sides
        (lambda: tf.LlamaForSequenceClassification(LLAMA), None),
        (lambda: tf.BertModel(BERT), None),
        (lambda: tf.BertForTokenClassification(BERT), None),
        (lambda: tf.T5ForConditionalGeneration(T5), None),
        (lambda: nn.Linear(3, 5), None),
    ],
)
def test_what_is_predicted(build: Callable[[], nn.Module], expected: str | None) -> None:
    assert ask.predicts(build()) == expected


def test_the_trial_of_what_is_predicted_is_not_watched() -> None:
    model = tf.BertLMHeadModel(BERT)
    with pytest.raises(hw.HeadwiseError, match="reached"), hw.watch(model) as seen:
        assert ask.predicts(model) == "masked"
    assert len(seen) == 0


def test_logits_and_losses(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "LOGITS", 5 * V)  # the losses of five rows at a time
    ids = torch.arange(7)[None].repeat(3, 1)
    with torch.no_grad():
        every, last = ask.logits(model, ids), ask.logits(model, ids, last=True)
    assert every.shape == (3, 7, V) and last.shape == (3, 1, V)
    assert torch.allclose(every[:, -1:], last, atol=1e-6)
    assert torch.equal(ask.answers(model, ids), every)
    ids = torch.randint(V, (3, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        losses, predicted = ask.next_token_losses(model, ids), ask.logits(model, ids)
    for row in range(3):
        assert torch.allclose(losses[row], F.cross_entropy(predicted[row, :-1], ids[row, 1:]), atol=1e-6)
    refuses(lambda: ask.next_token_losses(model, ids[:, :1]), "documents of 1 tokens have no next token")
    encoder = tf.BertModel(BERT).eval()
    assert ask.answers(encoder, torch.arange(7)[None]).shape == (1, 7, 20)
    refuses(lambda: ask.require_next(encoder), "BertModel does not predict the next token")


def test_a_model_that_raises_is_refused_by_what_it_raised() -> None:
    """Experts of some widths, for instance, which a kernel of torch does not take."""
    model: Any = tf.BertLMHeadModel(tf.BertConfig(**SIZES, is_decoder=True)).eval()
    model.cls.forward = lambda states: states / "4 bytes"
    calls = (lambda: ask.require_next(model), lambda: ask.answering(model), lambda: hw.generate(model, [3, 5], 2))
    for call in calls:
        refuses(call, r"^BertLMHeadModel .* \(it raises TypeError: unsupported operand .* where it reads ids alone\)")


def test_sizes_that_the_config_states(model: nn.Module) -> None:
    assert ask.vocabulary_of(model) == V and ask.context_of(model) in (11, 31)
    assert ask.context_of(tf.T5ForConditionalGeneration(T5)) is None
    endless = tf.XLNetModel(tf.XLNetConfig(vocab_size=V, d_model=20, n_layer=1, n_head=4, d_inner=7))
    assert ask.context_of(endless) is None
    own: Any = nn.Sequential(nn.Embedding(V, V))
    own.block_size = 5
    assert ask.context_of(own) == 5
    assert ask.context_of(tf.RobertaModel(tf.RobertaConfig(**SIZES, pad_token_id=1))) == 31 - 2
    assert ask.context_of(tf.BertModel(BERT)) == 31
    assert ask.config_fields(model)["vocab_size"] == V
    assert len(ask.output_matrix(model)[0]) == V
    assert ask.reads_tokens(model) and not ask.reads_tokens(nn.Linear(3, 5))


class Newer(nn.Module):
    """Keeps the ids it was given as its cache, by the name of transformers 5.24."""

    name = "cache"

    def forward(self, input_ids: Tensor, cache: Any = None) -> Any:
        held = [*(cache or []), *input_ids[0].tolist()]
        return SimpleNamespace(logits=F.one_hot(input_ids, V), **{self.name: held})


class Older(Newer):
    name = "past_key_values"

    def forward(self, input_ids: Tensor, past_key_values: Any = None) -> Any:
        return super().forward(input_ids, past_key_values)


@pytest.mark.parametrize("kind", [Newer, Older])
def test_a_cache_goes_by_the_name_that_the_model_has_for_it(kind: type[Newer]) -> None:
    reader = ask.Reader(kind())
    for ids in ([2, 3, 5], [7], [11]):
        reader(torch.tensor([ids]))
    assert reader.cache == [2, 3, 5, 7, 11]
    assert ask.cache_in({kind.name: reader.cache}) is reader.cache and ask.cache_in({"use_cache": True}) is None
    answer = type("Answer", (), {"cache": None, "past_key_values": property(pytest.fail)})()  # the older name warns
    assert ask.cache_in(answer) is None


def test_several_tokens_after_a_state_are_read_with_all_before_them() -> None:
    """A state-space layer goes on by one token; a piece of several begins anew in it."""
    config = tf.JambaConfig(
        **SIZES, num_key_value_heads=1, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, num_experts=1
    )
    model = shaken(tf.JambaForCausalLM(config), size=0.1)
    text = torch.arange(17)[None] % V
    reader = ask.Reader(model)
    with torch.no_grad():
        pieces = [reader(piece) for piece in text.split((7, 1, 5, 1, 3), 1)]
        whole = model(text, use_cache=False).logits[0, [6, 7, 12, 13, 16]]
    torch.testing.assert_close(torch.stack(pieces), whole, atol=1e-4, rtol=1e-4)


def test_the_text_side_of_a_pair() -> None:
    sides = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 20, "intermediate_size": 23}
    text = {**sides, "vocab_size": V, "max_position_embeddings": 31, "eos_token_id": 2}
    picture = {**sides, "image_size": 8, "patch_size": 4}
    model = tf.CLIPModel(tf.CLIPConfig(text_config=text, vision_config=picture, projection_dim=12)).eval()
    names = [f"text_model.L{layer}.H{head}" for layer in range(2) for head in range(2)]
    ids = torch.tensor([[3, 5, 7, 11, 2]])
    assert list(hw.survey(model, ids, ablate="none")) == names
    with hw.watch(model, ids) as heads:
        assert list(heads) == names
