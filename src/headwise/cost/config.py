"""A shape without a model: out of a config, for the families that an `AttentionSpec` describes, or of a preset.

families.toml holds whatever of a config its class in transformers reads and sizes follow from. A config that leaves a
size to its class, or that has a value not described there, is left to `cost.built`, which asks transformers. Presets
are layers as data, which `python studies/presets.py` writes out of configs. Models with layers of ours have specs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from headwise.cost.shape import Flops, Heads, Kept, Layer, ModelShape, Outside
from headwise.errors import HeadwiseError
from headwise.families import OURS
from headwise.files import packaged, read_json, read_toml
from headwise.masks import Causal, Window
from headwise.records import record_of
from headwise.spec import AttentionSpec, LatentSpec
from headwise.words import Facts

FAMILIES: dict[str, Facts] = read_toml("cost/families.toml")
PRESETS = read_json(packaged("cost/presets.json"))

LARGEST = 2**40  # of one size: far above any real one, so a larger number is a slip
# far above any real model; each layer is built, so a slip would take for ever
MOST = {"num_hidden_layers": 10_000, "num_attention_heads": 4096}
# the names that families give a size, and the usual one
USUAL = {
    "hidden_size": "hidden_size",
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "num_kv_heads": "num_key_value_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "intermediate_size": "intermediate_size",
    "n_inner": "intermediate_size",
    "d_ff": "intermediate_size",
    "ffn_hidden_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "n_positions": "max_position_embeddings",
    "context": "max_position_embeddings",
}


class UndescribedError(HeadwiseError):
    """A config that no formula describes exactly: the model has to be built."""


class Fields(dict[str, Any]):
    """The fields of one config by their usual names, those with a default of their class among them."""

    def __init__(self, config: Facts, facts: Facts) -> None:
        super().__init__(dict.fromkeys(facts["null"]) | facts["flags"])
        self.facts = facts
        for name, value in config.items():
            name = USUAL.get(name, name)
            if value is not None or name not in self:
                self[name] = value

    def __missing__(self, name: str) -> Any:
        raise UndescribedError(f"no {name}")

    def size(self, name: str) -> int:
        size = self.optional(name)
        if size is None:
            raise UndescribedError(f"{name}=null")
        return size

    def optional(self, name: str) -> Any:
        value = self[name]
        return value if value is None else check_size(name, value)

    def has(self, what: str, default: bool = False) -> bool:
        """Is there a bias, a gate, ...? The facts say so by a constant, or by the name of a flag of the config."""
        value = self.facts.get(what, default)
        if isinstance(value, str):
            what = value
            value = self[value]
        if not isinstance(value, bool):
            raise UndescribedError(f"{what}={value!r:.60}")
        return value


def check_size(name: str, value: Any) -> int:
    most = MOST.get(USUAL.get(name, name), LARGEST)
    if type(value) is not int or not 0 < value <= most:
        raise HeadwiseError(
            f"{name}={value!r:.60} must be a whole number from 1 to {most:,}"
        )
    return value


def check_sizes(config: Facts) -> None:
    """Refuse sizes that no model has, before anything is built; also those of the dicts inside."""
    for name, value in config.items():
        if isinstance(value, dict):
            check_sizes(value)
        elif name in USUAL and not isinstance(value, list | None):
            check_size(name, value)


def preset(name: str) -> ModelShape:
    """The sizes of a known model: rows of layers, and which layer is which row."""
    fields = {**PRESETS[name], "layers": ()}
    rows = [record_of(Layer, {"name": "", **row}) for row in fields.pop("rows")]
    numbers = enumerate(fields.pop("order"))
    layers = tuple(replace(rows[number], name=f"L{n}") for n, number in numbers)
    return replace(record_of(ModelShape, fields), layers=layers)


def shape_by_formula(config: Facts) -> ModelShape:
    """The sizes that the dict of a config.json says; a model of ours is read from its section `headwise` alone.

    Raises UndescribedError where only the built model has them, and HeadwiseError for what no model has.
    """
    kind = OURS if "headwise" in config else config.get("model_type")
    section = config.get("headwise") if kind == OURS else config
    if not isinstance(section, dict):
        raise HeadwiseError(
            "the section `headwise` is missing or no table; a run folder's config.json has one"
        )
    if kind not in FAMILIES:
        raise UndescribedError(f"model_type={kind!r}")
    facts = FAMILIES[kind]
    while "like" in facts:
        base = FAMILIES[facts["like"]]
        facts = base | {name: facts[name] for name in facts if name != "like"}
    f = Fields(section, facts)
    for name in facts.get("off", ()):
        if f.get(name):
            raise UndescribedError(f"{name}={f[name]!r:.60}")
    width = f.size("hidden_size")
    n_norms, n_outside = facts["norms"]
    gains = width
    if kind == OURS:
        gains *= f.has("gain") * (1 + (f["norm"] == "layer" and f.has("bias")))
        n_outside = f.has("embedding_norm") + f.has("final_norm")
    layer = layer_of("", _attention(f), whole_window=False)
    layer = layer.beside(*_feed_forward(f)).beside(n_norms * gains, 0)
    names = [f"L{n}" for n in range(f.size("num_hidden_layers"))]
    return ModelShape(
        family=kind,
        d_model=width,
        layers=tuple(replace(layer, name=name) for name in names),
        outside=_outside(f, n_outside * gains),
        positions=f.size("max_position_embeddings"),
    )


def layer_of(name: str, spec: AttentionSpec, whole_window: bool = True) -> Layer:
    """A layer with this attention alone.

    whole_window  does its cache keep a whole window between steps? That of transformers keeps one token less
    """
    weights = spec.q_weights + spec.kv_weights + spec.o_weights
    values = spec.cache_values_per_token
    rows = spec.window
    latent = None
    kind = "full" if rows is None else "sliding"
    width = read_as = spec.head_dim + spec.value_dim
    if isinstance(spec, LatentSpec):
        latent = values
        kind = "latent"
        weights += spec.expanding_weights
        # What is kept of a token, latent and rotary key, is read as a key, and its latent alone as a value.
        read_as = values + spec.latent_dim
    heads = Heads(
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
        window=rows,
        causal=spec.causal,
        sink=spec.sink,
        latent=latent,
        kv_head_parameters=spec.kv_head_parameters,
        parameters=spec.n_parameters,
    )
    if rows and not whole_window:
        rows -= 1
    return Layer(
        name=name,
        kind=kind,
        attention=heads,
        kept=(Kept(values=values, rows=rows, heads=True),) if rows != 0 else (),
        reading=Flops(2 * weights, 2 * spec.n_heads * width),
        writing=Flops(2 * weights, 2 * spec.n_heads * read_as),
    )


def _attention(f: Fields) -> AttentionSpec:
    bias = f.has("bias")
    # as `bias`, where the facts do not tell them apart
    qkv_bias = f.has("qkv_bias", bias)
    window = f.optional(f.facts["window"]) if "window" in f.facts else None
    # A window counts the query itself, and `Window` only what stands before it.
    mask = Window(window - 1, 0) if window else Causal()
    return AttentionSpec(
        d_model=f.size("hidden_size"),
        n_heads=f.size("num_attention_heads"),
        n_kv_heads=f.optional("num_key_value_heads"),
        head_dim=f.optional("head_dim"),
        mask=mask,
        out_bias=bias,
        q_bias=qkv_bias,
        kv_bias=qkv_bias,
        qk_norm=f.has("qk_norm"),
    )


def _feed_forward(f: Fields) -> tuple[int, int]:
    """Parameters, and entries of matrices, of down(act(up x)), or of down(act(gate x) * up x)."""
    d_model = f.size("hidden_size")
    factors = 2 + f.has("gated", True)
    width = f.optional("intermediate_size") or 4 * d_model
    weights = factors * d_model * width
    # The biases are those of up and, where there is one, of gate, each `width` long, and that of down.
    biases = f.has("ff_bias") * ((factors - 1) * width + d_model)
    return weights + biases, weights


def _outside(f: Fields, norms: int) -> Outside:
    """Tables, norms, and what the class adds behind the layers.

    The class is the first of `architectures`, or of the facts where it names none.
    """
    classes = f.facts["heads"]
    named = f.get("architectures") or list(classes)
    if not isinstance(named, list) or named[0] not in list(classes):
        raise UndescribedError(f"architectures={named!r:.60}")
    width = f.size("hidden_size")
    rows = f.size("vocab_size")
    tables = [rows, *map(f.size, f.facts.get("tables", ()))]
    if f.get("position") == "learned":  # our own GPT
        tables.append(f.size("max_position_embeddings"))
    has_head = classes[named[0]]
    is_tied = f.has("tied")
    matrix = width * rows
    return Outside(
        embeddings=sum(tables) * width,
        row=len(tables) * width,
        norms=norms,
        head=(not is_tied) * matrix if has_head else None,
        borrowed=has_head * is_tied * matrix,
        flops=has_head * 2 * matrix,
    )


def shape_of_modules(model: Any) -> ModelShape:
    """The shape of a model with layers of ours: attention by its specs, all else by its modules.

    Raises HeadwiseError for a matrix that is no Linear or Embedding.
    """
    from headwise.models.ask import context_of  # here: it loads torch

    modules = dict(model.named_modules())
    specs = {}
    for path, module in modules.items():
        if isinstance(getattr(module, "spec", None), AttentionSpec):
            specs[path] = module.spec
    if not specs:
        raise HeadwiseError(
            f"a {type(model).__name__} has no layer of headwise; pass the config of its family"
        )
    layers = {path: layer_of(f"L{n}", specs[path]) for n, path in enumerate(specs)}
    outside: Counter[str] = Counter()
    counted: set[Any] = set()
    for path, module in modules.items():
        if any(_is_in(path, attention) for attention in specs):
            continue
        weights = set(module.parameters(recurse=False))
        size = sum(p.numel() for p in weights - counted)
        is_table = hasattr(module, "num_embeddings")
        matrix = module.weight.numel() if hasattr(module, "in_features") else 0
        if not (matrix or is_table) and any(p.ndim > 1 for p in weights):
            raise HeadwiseError(
                f"{path or type(model).__name__} has a matrix and is no Linear or Embedding, so that what a token "
                f"costs there is not known; price the model with Linears in their place"
            )
        attention = _beside(path, specs)
        if attention is not None:
            layers[attention] = layers[attention].beside(size, matrix)
        elif is_table:
            outside.update(embeddings=size, row=module.embedding_dim)
        else:
            outside["head" if matrix else "norms"] += size
            outside["flops"] += 2 * matrix
            if weights & counted:  # a head that is tied to a table
                outside["borrowed"] += matrix
        counted |= weights
    first = next(iter(specs.values()))
    return ModelShape(
        family="own",
        d_model=first.d_model,
        layers=tuple(layers.values()),
        outside=Outside(**outside),
        positions=context_of(model),
        generates=first.causal,
        dtype=str(next(model.parameters()).dtype),
        way="built",
    )


def _is_in(path: str, module: str) -> bool:
    return f"{path}.".startswith(f"{module}.")


def _beside(path: str, attentions: Iterable[str]) -> str | None:
    """The attention in whose layer a module stands: the only one in the smallest module around both."""
    while path:
        around = [each for each in attentions if _is_in(each, path)]
        if around:
            return around[0] if len(around) == 1 else None
        path = path.rpartition(".")[0]
    return None
