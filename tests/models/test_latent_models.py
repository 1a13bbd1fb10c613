"""Models of transformers whose heads share a latent (MLA)."""

import pytest
import torch
import transformers as tf

import headwise as hw
from headwise.models.hook import attach
from headwise.models.sites import sites_of
from headwise.records import Call

pytestmark = pytest.mark.usefixtures("no_gradients")

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])


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
