"""The price of a model: parameters, cache, FLOPs, bytes moved, what fits in memory; it needs no weights.

    hw.price("llama-2-70b", context=4096, dtype="bf16").cache.bytes_per_token     # 327,680
    hw.price(config, batch=8, memory="24GiB").memory.longest_context              # the dict of a config.json, a model

Two ways lead to one record, a `ModelShape`. Families that an `AttentionSpec` describes are priced from their config by
formulas, without torch (`cost.config`). Any other family of transformers is built without memory and run without data
(`cost.built`). What cannot be priced exactly is refused with a HeadwiseError that gives the reason.
"""

from headwise.cost.config import PRESETS as PRESETS
from headwise.cost.price import TABLE as TABLE
from headwise.cost.price import Price as Price
from headwise.cost.price import Setting as Setting
from headwise.cost.price import Variant as Variant
from headwise.cost.price import make_setting as make_setting
from headwise.cost.price import price as price
from headwise.cost.price import price_shape as price_shape
from headwise.cost.price import shape_of as shape_of
from headwise.cost.price import variants as variants
