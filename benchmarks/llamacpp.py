"""llama.cpp beside the decode forms: the same Llama as GGUF files, float32 and Q8_0 (`benchmarks.decode`).

Needs `llama-cpp-python` (which compiles llama.cpp) and `gguf`; without them the rows are not measured.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# Of each layer: its name in GGUF and in transformers.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
AROUND = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def readers(theirs: Any, folder: Path, context: int) -> dict[str, Any]:
    """The model of transformers as llama.cpp reads it, in two formats; none where it is not installed."""
    try:
        from gguf import GGMLQuantizationType as Kind
        from llama_cpp import Llama
    except ImportError as error:
        print(f"llama.cpp is not there ({error}): no figures beside it", file=sys.stderr)
        return {}
    threads = torch.get_num_threads()
    found = {}
    for name, kind in {"llama.cpp F32": Kind.F32, "llama.cpp Q8_0": Kind.Q8_0}.items():
        path = folder / f"{kind.name}.gguf"
        write(theirs, path, kind)
        found[name] = Llama(
            str(path), n_ctx=context, n_batch=context, n_threads=threads, n_threads_batch=threads, verbose=False
        )
    return found


def write(model: Any, path: Path, kind: Any) -> None:
    """A Llama as a GGUF file without a vocabulary; norms stay in float32."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    config, weights = model.config, model.state_dict()
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = dict(AROUND)
    for layer in range(config.num_hidden_layers):
        names |= {f"blk.{layer}.{ours}": f"model.layers.{layer}.{theirs}" for ours, theirs in LAYER.items()}
    for name, source in names.items():
        weight = weights[f"{source}.weight"]
        if name.endswith(("attn_q", "attn_k")):
            weight = interleaved(weight, config.head_dim)
        of = GGMLQuantizationType.F32 if weight.dim() == 1 else kind
        writer.add_tensor(f"{name}.weight", quantize(weight.float().numpy(), of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows so that neighbours turn together, as llama.cpp has it; transformers turns i with i + head_dim / 2."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2).contiguous()


def greedy(reader: Any, ids: list[int], n: int) -> list[float]:
    """When it began, and when each of the next n tokens came."""
    reader.reset()
    times, fed = [time.perf_counter()], ids
    for _ in range(n):
        reader.eval(fed)
        fed = [int(logits_of(reader).argmax())]
        times.append(time.perf_counter())
    return times


def logits_of(reader: Any) -> NDArray[np.float32]:
    """Of the last token that was read."""
    return np.ctypeslib.as_array(reader._ctx.get_logits_ith(-1), shape=(reader.n_vocab(),))
