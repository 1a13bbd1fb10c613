"""The price of a model, out of its config.json alone: parameters, cache, FLOPs, bytes moved, what fits in memory.

    hw.price("llama-2-70b", context=4096, dtype="bf16").cache.bytes_per_token     # 327,680
    hw.price(config, batch=8, gpu_memory="24GiB").memory.longest_context          # the dict of a config.json, a model

Needs neither torch nor a network. What cannot be priced exactly is refused with a HeadwiseError that names the field.
"""

from headwise.cost.choices import TABLE, Choice, Variant, choose, variants
from headwise.cost.pricing import Price, Setting, make_setting, price_shape
from headwise.cost.read import PRESETS, cache_bytes_per_token, price, read_shape

__all__ = [
    "PRESETS",
    "TABLE",
    "Choice",
    "Price",
    "Setting",
    "Variant",
    "cache_bytes_per_token",
    "choose",
    "make_setting",
    "price",
    "price_shape",
    "read_shape",
    "variants",
]
