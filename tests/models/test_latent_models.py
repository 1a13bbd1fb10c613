"""Models of transformers whose heads share a latent (MLA)."""

import pytest
import torch
import transformers as tf

import headwise as hw

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])


@pytest.mark.parametrize("q_lora_rank", [11, None])
def test_the_heads_of_deepseek_are_watched_without_what_needs_their_value_matrix(q_lora_rank: int | None) -> None:
    fields = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 3}
    fields |= {"vocab_size": 61, "intermediate_size": 37, "first_k_dense_replace": 1, "max_position_embeddings": 97}
    widths = {"kv_lora_rank": 13, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 7}
    model = tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**fields, **widths, q_lora_rank=q_lora_rank)).eval()
    found = hw.survey(model, IDS.tolist(), controls=False)
    assert "copying" not in found["L0.H2"].scores and "entropy" in found["L0.H2"].scores
    assert "Copying is left out of L0: W_V is not one matrix there." in map(str, found.notes)
    with pytest.raises(hw.HeadwiseError, match=r"^L0: W_Q, W_K, W_V and W_O are not four matrices"):
        hw.composition(model)
