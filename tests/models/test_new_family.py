"""A family that nobody has seen: one record, and its heads are watched, imported, shared and pruned."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from cases import refuses
from helpers import watch_call
from small_models import shaken
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

import headwise as hw
from headwise.families import FAMILIES, Family
from headwise.models.ask import answers
from headwise.models.weights import head_counts, read_layers
from headwise.reshape.align import moments
from headwise.reshape.prune import prune_heads
from headwise.reshape.share import share_heads

NovelRotaryEmbedding = LlamaRotaryEmbedding  # importers look for it beside the attention


class NovelConfig(tf.LlamaConfig):
    model_type = "novel"


class NovelAttention(nn.Module):
    """Llama's attention under names that no other family has."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        usual = LlamaAttention(config, layer_idx)
        self.config, self.layer_idx = config, layer_idx
        self.wide, self.factor, self.is_causal = usual.head_dim, usual.scaling, True
        self.num_key_value_groups = usual.num_key_value_groups
        self.ask, self.tell, self.hold, self.mix = usual.q_proj, usual.k_proj, usual.v_proj, usual.o_proj

    @property
    def head_dim(self) -> int:
        return int(self.wide)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **keywords: Any,  # a cache among them, which this attention leaves alone
    ) -> tuple[Tensor, Tensor | None]:
        shape = (*hidden_states.shape[:-1], -1, self.wide)
        q, k, v = (part(hidden_states).view(shape).transpose(1, 2) for part in (self.ask, self.tell, self.hold))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.factor, **keywords)
        return self.mix(out.reshape(*shape[:-2], -1).contiguous()), weights


class NovelForCausalLM(tf.LlamaForCausalLM):
    config_class = NovelConfig

    def __init__(self, config: NovelConfig) -> None:
        super().__init__(config)
        for n, layer in enumerate(self.model.layers):
            layer.self_attn = NovelAttention(config, n)


NAMES = {"q": "ask", "k": "tell", "v": "hold", "o": "mix"}
RECORD = Family(name="novel", **NAMES)


@pytest.fixture
def model() -> Iterator[NovelForCausalLM]:
    torch.manual_seed(0)
    config = NovelConfig(
        vocab_size=19, hidden_size=24, intermediate_size=23, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=41,
    )  # fmt: skip
    yield shaken(NovelForCausalLM(config), size=0.1)
    FAMILIES.pop("novel", None)


def test_without_a_record_its_weights_are_not_known(model: Any) -> None:
    seen = watch_call(model, torch.arange(7)[None])
    assert len(seen) == 12 and "norm" not in seen["L0.H0"].rows  # what a head adds goes through W_O
    refuses(lambda: read_layers(model), "novel is a family whose heads cannot be reshaped yet")


def test_without_a_record_a_large_model_has_a_control(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.heads import survey

    monkeypatch.setattr(survey, "WHOLE", 10)
    monkeypatch.setattr(survey, "SAMPLE", 1)
    documents = torch.randint(3, 19, (3, 13), generator=torch.Generator().manual_seed(1)).tolist()
    result = hw.survey(model, documents, ablate="none")
    assert result.untrained and any("The untrained control has 1 layers" in note for note in result.notes)


@torch.no_grad()
def test_one_record_is_enough(model: Any) -> None:
    FAMILIES["novel"] = RECORD
    ids = torch.arange(7)[None]
    seen = watch_call(model, ids)
    assert (seen["L1.H5"].rows["norm"] > 0).all()
    layers = read_layers(model)
    assert layers[0].wq.shape == (6, 4, 24) and layers[0].wk.shape == (3, 4, 24)
    shared = share_heads(model, 1, moments(model, [ids])).model
    assert head_counts(shared) == (6, 1, 4)
    assert answers(shared, ids).isfinite().all() and type(shared) is NovelForCausalLM
    pruned = prune_heads(model, ((0, 1), (4, 5)), uniform=True).model
    assert head_counts(pruned)[0] == 4 and answers(pruned, ids).shape == (1, 7, 19)


@pytest.mark.parametrize("q_lora_rank", [11, None])
def test_the_heads_of_deepseek_are_watched_without_what_needs_their_value_matrix(q_lora_rank: int | None) -> None:
    fields = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 3}
    fields |= {"vocab_size": 61, "intermediate_size": 37, "first_k_dense_replace": 1, "max_position_embeddings": 97}
    widths = {"kv_lora_rank": 13, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 7}
    model = tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**fields, **widths, q_lora_rank=q_lora_rank)).eval()
    found = hw.survey(model, [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]], controls=False)
    assert "copying" not in found["L0.H2"].scores and "entropy" in found["L0.H2"].scores
    with pytest.raises(
        hw.HeadwiseError, match=r"^L0: of DeepseekV3Attention no matrix of whole heads is known for .*W_K, W_V; "
    ):
        hw.composition(model)
