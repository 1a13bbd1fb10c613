"""A shape out of a model of transformers that is built without memory, on the meta device, and run there.

Parameters are counted on its modules; its heads are where `watch` finds them; its own cache says what is kept of a
text; FLOPs are those of torch's counter. Two prompts of different lengths, and a step behind each, tell what grows
with the text, and how:

    prompt of 8, step of 1      FLOPs of a token and of a pair, both of reading and of writing
    prompt of 16, step of 1     numbers kept of each token, and those that stay as they are
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from headwise.cost.shape import Experts, Heads, Kept, Layer, ModelShape, Piece
from headwise.errors import HeadwiseError
from headwise.models.ask import cache_name, context_of, parameters_of
from headwise.models.hf import AnyCache, meta_model, quiet
from headwise.models.sites import Site, sites_of

SHORT = (8, 16)  # tokens of the two prompts
CHUNK = (
    64  # tokens that a linear attention works through at a time, where its config does not say it
)
# where a model hands out what it keeps, and fields of configs with the experts of a token
CACHES = ("cache", "past_key_values", "cache_params", "state", "mems")
ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of a run without data, by the module that is running.

    What data would decide is decided as if all of it were zeros: no expert of a loop is met, no token is padding.
    """

    def __init__(self, known: dict[Any, tuple[Any, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside = [""]  # names of the modules that run, the innermost last
        self.flops: Counter[str] = Counter()
        self.calls = 0
        # Layers repeat one another, and sizes of results take long to derive: they are kept, by function and arguments.
        self.known = known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::_local_scalar_dense" and args[0].is_meta:
            return 0
        if name == "aten::nonzero" and args[0].is_meta:
            return torch.empty((0, args[0].dim()), dtype=torch.long, device="meta")
        key = None
        if not any(value.alias_info for value in (*func._schema.returns, *func._schema.arguments)):
            key = (func, _signature(args), _signature(tuple(kwargs.items())))
            if None not in key and key in self.known:
                (size, stride, dtype), flops = self.known[key]
                self.flops[self.inside[-1]] += flops
                return torch.empty_strided(size, stride, dtype=dtype, device="meta")
        out = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        flops = 0 if count is None else count(*args, **kwargs, out_val=out)
        self.flops[self.inside[-1]] += flops
        if key and None not in key and isinstance(out, Tensor) and out.is_meta:
            self.known[key] = (out.shape, out.stride(), out.dtype), flops
        return out


def _signature(value: Any) -> Any:
    """What of the arguments of a function decides the size of its result; None where it may be more."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            return None
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        parts = tuple(map(_signature, value))
        return None if None in parts else parts
    plain = isinstance(value, int | float | str | torch.dtype | torch.device | torch.layout)
    return (type(value), value) if plain or value is None else None


@dataclass
class Stack:
    """The layers of a decoder: lists of modules side by side, whose modules of one number are one layer."""

    n: int
    place: dict[nn.Module, int] = field(default_factory=dict)  # any module inside -> its layer
    tops: list[list[nn.Module]] = field(default_factory=list)  # of each layer
    known: dict[Any, tuple[Any, int]] = field(default_factory=dict)  # see Counting
    _sites: dict[int, Site] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module) -> Stack:
        """The lists that hold the most parameters, of those that lie in no other list."""
        lists: defaultdict[tuple[str, int], list[nn.ModuleList]] = defaultdict(list)
        for path, module in model.named_modules():
            numbered = any(part.isdigit() for part in path.split("."))
            if isinstance(module, nn.ModuleList) and len(module) and not numbered:
                lists[path.rpartition(".")[0], len(module)].append(module)
        if not lists:
            raise HeadwiseError(
                f"{type(model).__name__} has no list of layers; it cannot be priced"
            )

        def size(key: tuple[str, int]) -> int:
            return sum(p.numel() for each in lists[key] for p in each.parameters())

        key = max(lists, key=size)
        stack = Stack(key[1], tops=[[each[n] for each in lists[key]] for n in range(key[1])])
        for n, tops in enumerate(stack.tops):
            for top in tops:
                for module in top.modules():
                    stack.place.setdefault(module, n)
        return stack

    def sites(self, model: nn.Module) -> dict[int, Site]:
        """The attention of each layer that has one; of several the first that is no cross attention."""
        if not self._sites:
            with suppress(HeadwiseError):
                for site in sites_of(model):
                    n = self.place.get(site.module, -1)
                    if n >= 0 and not site.cross:
                        self._sites.setdefault(n, site)
        return self._sites


@dataclass(frozen=True)
class Entry:
    """A tensor of a cache."""

    shape: tuple[int, ...]
    values: int
    bits: int


@dataclass
class Run:
    """One run: FLOPs by name ("3" is a layer, "3e" its experts, "" what is outside), and what is kept."""

    tokens: int
    seen: int  # keys before and in it
    flops: Counter[str]
    calls: int
    bits: int  # of a number of the model; what has others has them whatever the model's format is
    name: str  # of the cache among the arguments of the model
    cache: Any
    kept: list[dict[str, Entry]]  # of each layer

    def attribute(self, n: int, name: str) -> Any:
        """What the cache of a layer says of itself; None where it does not."""
        cache = getattr(self.cache, "self_attention_cache", self.cache)
        layers = getattr(cache, "layers", ())
        return getattr(layers[n], name, None) if n < len(layers) else None


def shape_of_fields(fields: Mapping[str, Any]) -> ModelShape:
    """The shape of the model of a config. Raises HeadwiseError, with the reason, for what cannot be built or run."""
    model, part = meta_model(fields)
    shape = shape_of_model(model, str(fields["model_type"]))
    return shape.noted(f"priced is {part}") if part else shape


def shape_of_model(model: Any, family: str) -> ModelShape:
    """The shape of a model on the meta device."""
    stack = Stack.of(model)
    runs = [_run(model, stack, tokens) for tokens in SHORT]
    steps: list[Run] = []
    if any(runs[0].kept):
        with suppress(HeadwiseError):  # CPM-Ant has a cache, and no step of one token beside it
            steps = [_run(model, stack, 1, run) for run in runs]
    lengths = runs
    # A layer that fills up a chunk of tokens costs the same however few there are; one that loops over them does not.
    is_loop = runs[1].calls - runs[0].calls > SHORT[0]
    config = model.config.get_text_config(decoder=True)
    if any(runs[0].kept) and not is_loop and any(_has_state(runs, n) for n in range(stack.n)):
        named = (getattr(config, name, None) for name in ("chunk_size", "mamba_chunk_size"))
        chunk: int = next(filter(None, named), CHUNK)
        lengths = [_run(model, stack, tokens) for tokens in (chunk, 2 * chunk)]
    of_layer = [Built(model, config, stack, runs, n) for n in range(stack.n)]
    counts = _parameters(model, of_layer, stack)
    layers = tuple(built.layer(counts[built.n], lengths, steps) for built in of_layer)
    return ModelShape(
        family=family,
        d_model=_table(model).weight.shape[-1],
        layers=layers,
        pieces=_pieces(model, counts[-1], lengths),
        positions=context_of(model),
        generates=any(layer.kept for layer in layers),
        way="built",
    )


def _has_state(runs: Sequence[Run], n: int) -> bool:
    """Does a layer keep numbers that do not grow with the text, apart from a window?"""
    first, second = (run.kept[n] for run in runs)
    return not runs[0].attribute(n, "is_sliding") and any(
        first[name].values == entry.values for name, entry in second.items() if name in first
    )


def _run(model: Any, stack: Stack, tokens: int, before: Run | None = None) -> Run:
    """Read a prompt, or write one token behind it."""
    counting, handles = Counting(stack.known), []

    def enter(name: str) -> Any:
        return lambda *_: counting.inside.append(name)

    def leave(*_: Any) -> None:
        counting.inside.pop()

    for n, tops in enumerate(stack.tops):
        for top in tops:
            named = [
                (top, str(n)),
                *((each, f"{n}e") for each in top.modules() if _is_experts(each)),
            ]
            for module, name in named:
                handles.append(module.register_forward_pre_hook(enter(name)))
                handles.append(module.register_forward_hook(leave))
    ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    try:
        with torch.no_grad(), quiet(), counting:
            name, cache = called(model, ids, *((before.name, before.cache) if before else ()))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HeadwiseError(
            f"a {model.config.model_type} of this config does not run without data: {reason}"
        ) from None
    finally:
        for handle in handles:
            handle.remove()
    seen = tokens + (before.seen if before else 0)
    kept = _entries(cache, model, stack)
    bits = 8 * _table(model).weight.element_size()
    return Run(tokens, seen, counting.flops, counting.calls, bits, name, cache, kept)


def _table(model: Any) -> Any:
    """The table of the tokens; the first of several, as where MusicGen reads several codes of a sound."""
    table = model.get_input_embeddings()
    return table[0] if isinstance(table, nn.ModuleList) else table


def called(model: Any, ids: Tensor, name: str = "", cache: Any = None) -> tuple[str, Any]:
    """Call a model of transformers on ids (B,T): the name of its cache among its arguments, and the cache."""
    arguments = {"input_ids": ids, "use_cache": True}
    if "lang_ids" in parameters_of(model):  # X-MOD has an adapter for each language, and runs one
        arguments["lang_ids"] = torch.zeros(len(ids), dtype=torch.long)
    if name:
        arguments[name] = cache
    try:
        out = model(**arguments)
    except (ValueError, IndexError):
        if name:
            raise
        return called(model, ids, cache_name(model), AnyCache(config=model.config))
    except (
        RuntimeError
    ):  # a class that mixes number formats or devices, or reads several codes of a sound at a time
        arguments["input_ids"] = ids.expand(getattr(model.config, "num_codebooks", 1), -1)
        with ids.device:
            out = model.to(torch.float32)(**arguments)
    for key in CACHES:
        if getattr(out, key, None) is not None:
            return key, getattr(out, key)
    if not name and any(hasattr(module, "_setup_cache") for module in model.modules()):
        # Recurrent Gemma has states in its modules, and keys and values in a cache that is handed to it
        return called(model, ids, cache_name(model), AnyCache(config=model.config))
    return name, cache


def cached_bytes(model: Any, cache: Any) -> int:
    """Bytes that a model of transformers keeps in its cache and its modules."""
    layers = _entries(cache, model, Stack.of(model))
    return sum(entry.values * entry.bits // 8 for layer in layers for entry in layer.values())


def _entries(cache: Any, model: nn.Module, stack: Stack) -> list[dict[str, Entry]]:
    """What each layer keeps, by name, as it is now; each tensor once."""
    kept: list[dict[str, Entry]] = [{} for _ in range(stack.n)]
    cache = getattr(cache, "self_attention_cache", cache)  # beside that of cross attention
    if isinstance(cache, tuple) and len(cache) == stack.n:  # XLNet
        for each, value in zip(kept, cache, strict=True):
            each |= dict(_inside({"memory": value}))
    elif hasattr(cache, "layers"):  # a cache of transformers: lists with an entry for each layer
        lists = {name: value for name, value in vars(cache).items() if isinstance(value, list)}
        for name, values in lists.items():
            for each, value in zip(kept, values, strict=False):
                each |= dict(_inside(vars(value) if name == "layers" else {name: value}))
    else:  # of all layers together: each has an equal part
        for name, entry in _inside(getattr(cache, "__dict__", cache)):
            for each in kept:
                each[name] = replace(entry, values=entry.values // stack.n)
    for number, (module, n) in enumerate(
        stack.place.items()
    ):  # Recurrent Gemma's are in its modules
        of_module = {name: value for name, value in vars(module).items() if "state" in name}
        kept[n] |= {f"{number}.{name}": entry for name, entry in _inside(of_module)}
    return kept


def _inside(
    value: Any, name: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, Entry]]:
    """The tensors of numbers in a record, each once, by their paths."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
        if id(value) not in seen:
            seen.add(id(value))
            yield name, Entry(tuple(value.shape), value.numel(), 8 * value.element_size())
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _inside(inner, f"{name}.{key}".strip("."), seen)


def _kept(runs: Sequence[Run], n: int, memory: int | None) -> list[Kept]:
    """How what a layer keeps grows with the text, from two prompts; XLNet's `memory` is of so many tokens at most."""
    first, second = runs
    window, every = first.attribute(n, "sliding_window"), first.attribute(n, "compress_rate")
    parts: dict[Kept, int] = {}
    for name, entry in second.kept[n].items():
        before = first.kept[n].get(name)
        fixed = None if entry.bits == second.bits else entry.bits
        is_row = name in ("keys", "values")
        if is_row and window is not None and first.attribute(n, "is_sliding"):
            rows = window - 1
            values = entry.values // min(second.tokens, rows) if rows else 0
            law = Kept(values=0, rows=rows, heads=True, bits=fixed)
        elif every is not None and name.startswith(("compressed", "buffer")):
            values = entry.values // entry.shape[1] if entry.shape[1] else entry.shape[-1]
            is_open = name.startswith("buffer")
            law = Kept(values=0, every=every, open_block=is_open, bits=fixed)
        else:
            grown = entry.values - (before.values if before else entry.values)
            values, rest = divmod(grown, second.tokens - first.tokens)
            # CPM-Ant adds tokens of its own to each text, so that not all that is kept need grow
            rows = memory if name == "memory" else None
            law, once = (
                Kept(values=0, rows=rows, heads=is_row, bits=fixed),
                Kept(values=0, grows=False, bits=fixed),
            )
            if rest or grown < 0:
                raise HeadwiseError(
                    f"L{n} keeps {entry.values} numbers of {second.tokens} tokens as {name}, and {grown} fewer of "
                    f"{first.tokens}: how they grow is not known"
                )
            parts[once] = parts.get(once, 0) + entry.values - values * second.tokens
        parts[law] = parts.get(law, 0) + values
    return [replace(law, values=values) for law, values in parts.items() if values]


def _law(runs: Sequence[Run], n: int, quadratic: bool) -> tuple[int, int]:
    """FLOPs of a layer as those of a token and of a pair: a T + b T^2 of prompts, a + b S of steps beside S keys."""
    short, long = runs
    (x, t), (y, u) = ((run.flops[str(n)] + run.flops[f"{n}e"], run.tokens) for run in runs)
    if quadratic:
        pair = max(0, (y * t - x * u) // (t * u * (u - t)))
        return (y - pair * u * u) // u, pair
    s, r = short.seen, long.seen
    pair = max(0, (y - x) // (r - s))
    return x - pair * s, pair


class Built:
    """One layer of a model that was built."""

    def __init__(self, model: Any, config: Any, stack: Stack, runs: Sequence[Run], n: int) -> None:
        self.n, self.config, self.runs = n, config, runs
        self.modules = [module for top in stack.tops[n] for module in top.modules()]
        sites = stack.sites(model)
        self.site: Site | None = sites.get(n)
        self.kept = _kept(runs, n, getattr(config, "mem_len", None))
        # what stands in the place of an attention knows the number of its layer, for its part of the cache
        self.mixers = {
            part
            for module in self.modules
            if isinstance(getattr(module, "layer_idx", None), int) and module not in stack.tops[n]
            for part in module.modules()
        }
        self.attention: set[nn.Module] = set()
        if self.site is not None:
            around = [m for m in self.modules if self.site.module in m.modules()]
            # the innermost module around the one that computes the heads that holds W_O, too
            holders = [m for m in around if self.site.projection in set(m.modules())]
            inner = min(holders or around, key=lambda m: len(list(m.modules())))
            if inner not in stack.tops[n]:
                self.attention = set(inner.modules())

    def part(self, module: nn.Module) -> str:
        """What the parameters of a module inside the layer count as."""
        if module in self.attention:
            return "attention"
        if module in self.mixers:
            return "mixer" if self.site is None or self.attention else "attention"
        return "norms" if "norm" in type(module).__name__.lower() else "feed-forward"

    def layer(self, counts: Counter[str], lengths: Sequence[Run], steps: Sequence[Run]) -> Layer:
        heads = self.heads(counts["attention"])
        experts = self.experts(lengths[1])
        linear, pair = _law(lengths, self.n, quadratic=True)
        if heads is None:  # it has no pairs: a chunk costs a little more behind another one
            long = lengths[1]
            linear = (long.flops[str(self.n)] + long.flops[f"{self.n}e"]) // long.tokens
        step, step_pair = linear, pair
        if steps:
            step, step_pair = _law(steps, self.n, quadratic=False)
            window = heads.window if heads else None
            if window is not None and window <= SHORT[1]:  # it was full before the second step
                x = steps[0].flops[str(self.n)] + steps[0].flops[f"{self.n}e"]
                step, step_pair = x - pair * min(window, SHORT[0] + 1), pair
        if experts is not None and not lengths[1].flops[f"{self.n}e"]:
            # a loop over experts, of which a run without data meets none
            more = 2 * experts.active * experts.matrices
            linear, step = linear + more, step + more
        return Layer(
            name=f"L{self.n}",
            kind=self.kind(heads),
            heads=heads,
            kept=tuple(self.kept),
            mixer_parameters=counts["mixer"] + (0 if heads else counts["attention"]),
            feed_forward_parameters=counts["feed-forward"],
            norm_parameters=counts["norms"],
            experts=experts,
            linear=linear,
            pair=pair if heads else 0,
            step=step,
            step_pair=step_pair if heads else 0,
        )

    def heads(self, parameters: int) -> Heads | None:
        if self.site is None:
            return None
        module, entries = self.site.module, self.runs[1].kept[self.n]
        n_heads = self.site.n_heads or getattr(self.config, "num_attention_heads", 0)
        keys, values = entries.get("keys"), entries.get("values")
        latent = None
        n_kv_heads, head_dim = n_heads, getattr(module, "head_dim", 0)
        value_dim = head_dim
        if keys is not None and len(keys.shape) == 4:
            n_kv_heads, head_dim = keys.shape[1], keys.shape[3]
            value_dim = values.shape[3] if values else head_dim
        if isinstance(getattr(module, "kv_lora_rank", None), int) and keys is not None:
            latent = sum(part.values for part in self.kept if part.heads)
            n_kv_heads = n_heads
            head_dim = getattr(module, "qk_head_dim", head_dim)
            value_dim = getattr(module, "v_head_dim", value_dim)
        w_q, w_k, w_v, w_o = map(self.site.weights, "qkvo")
        if not head_dim and w_q is not None:
            head_dim = value_dim = len(w_q) // (n_heads or 1)
        of_query = [w for w in (w_q, w_o) if w is not None]
        of_key = [w for w in (w_k, w_v) if w is not None]
        biased = any(
            getattr(m, "bias", None) is not None for m in self.attention if isinstance(m, nn.Linear)
        )
        query = sum(w.numel() for w in of_query) // (n_heads or 1)
        key = sum(w.numel() for w in of_key) // (n_kv_heads or 1)
        if biased and of_key:
            key += head_dim + value_dim
        matrices = (p for m in self.attention for p in m.parameters(recurse=False) if p.ndim == 2)
        window = self.runs[0].attribute(self.n, "sliding_window")
        return Heads(
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            window=window if self.runs[0].attribute(self.n, "is_sliding") else None,
            causal=bool(self.kept) or getattr(self.config, "is_decoder", False),
            chunked=self.type == "chunked_attention",
            sink=any("sink" in name for name, _ in module.named_parameters()),
            latent=latent,
            query_head_parameters=query,
            kv_head_parameters=key,
            shared_parameters=0 if latent else parameters - query * n_heads - key * n_kv_heads,
            parameters=parameters,
            weights=sum(p.numel() for p in matrices),
        )

    @property
    def type(self) -> str:
        """What the config calls the kind of the layer; "" where it does not."""
        types = getattr(self.config, "layer_types", None) or []
        return str(types[self.n]) if self.n < len(types) else ""

    def kind(self, heads: Heads | None) -> str:
        """The kind of the layer by what it keeps."""
        entries = self.runs[1].kept[self.n]
        names = []
        if heads is not None and any(part.heads for part in self.kept):
            is_sliding = heads.window is not None
            is_indexed = any("ind" in name or "idx" in name for name in entries)
            if self.runs[0].attribute(self.n, "compress_rate"):
                names.append("compressed")
            elif heads.latent is not None:
                names.append("latent")
            elif not is_indexed:
                names.append("chunked" if heads.chunked else "sliding" if is_sliding else "full")
            if is_indexed:
                names.append("indexed")
        others = [name for name in entries if name not in ("keys", "values")]
        if others and "compressed" not in names and not all(part.grows for part in self.kept):
            names.append("conv" if all("conv" in name for name in others) else "linear")
        if not names and heads is not None:
            is_shared = not self.kept and any(self.runs[1].kept)
            names.append("shared" if is_shared else "full")
        return " + ".join(names) or "none"

    def experts(self, run: Run) -> Experts | None:
        """The experts of the layer, and how many a token is sent to: by the FLOPs, else by the config."""
        modules = [each for each in self.modules if _is_experts(each)]
        if not modules:
            return None
        module = modules[0]
        if isinstance(module, nn.ModuleList):
            count, each = len(module), list(module[0].parameters())
            parameters = sum(p.numel() for p in each)
            matrices = sum(p.numel() for p in each if p.ndim > 1)
        else:
            of_all = list(module.parameters())
            count = next(p.shape[0] for p in of_all if p.ndim == 3)
            parameters = sum(p.numel() for p in of_all) // count
            matrices = sum(p.numel() for p in of_all if p.ndim == 3) // count
        told = (getattr(self.config, name, None) for name in ACTIVE)
        active = next((each for each in told if isinstance(each, int)), 1)
        if flops := run.flops[f"{self.n}e"]:
            active = round(flops / (2 * run.tokens * matrices))
        return Experts(
            count=count, active=min(active, count), parameters=parameters, matrices=matrices
        )


def _is_experts(module: nn.Module) -> bool:
    """Does it hold the weights of all experts of a layer, as tensors of three axes or as a list?"""
    if isinstance(module, nn.ModuleList):
        return (
            "Expert" in type(module).__name__ or "Expert" in type(next(iter(module), None)).__name__
        )
    is_named = type(module).__name__.endswith("Experts")
    return is_named and any(p.ndim == 3 for p in module.parameters(recurse=False))


def _parameters(model: Any, of_layer: Sequence[Built], stack: Stack) -> dict[int, Counter[str]]:
    """Parameters of each layer by what has them, and under -1 those outside, each once."""
    counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
    counted: set[nn.Parameter] = set()
    head, table = model.get_output_embeddings(), _table(model)
    # the table first: a head may be tied to it
    for module in (table, *model.modules()):
        n = stack.place.get(module, -1)
        for weights in module.parameters(recurse=False):
            if weights in counted:
                continue
            counted.add(weights)
            if n >= 0:
                part = of_layer[n].part(module)
            elif isinstance(module, nn.Embedding):
                part = "embeddings"
            elif module is head:
                part = "head"
            else:
                part = "norms" if "norm" in type(module).__name__.lower() else "others"
            counts[n][part] += weights.numel()
    return counts


def _pieces(model: Any, counts: Counter[str], lengths: Sequence[Run]) -> tuple[Piece, ...]:
    """What stands outside the layers."""
    (x, t), (y, u) = ((run.flops[""], run.tokens) for run in lengths)
    per_token = (y - x) // (u - t)
    head, table = model.get_output_embeddings(), _table(model)
    is_tied = getattr(head, "weight", None) is table.weight
    borrowed = math.prod(table.weight.shape) if is_tied else 0
    pieces = [
        Piece(part="embeddings", parameters=counts["embeddings"], row=table.weight.shape[-1]),
        Piece(part="norms", parameters=counts["norms"]),
    ]
    if counts["others"]:
        pieces.append(Piece(part="others", parameters=counts["others"]))
    if head is not None or x:
        pieces.append(
            Piece(
                part="head",
                parameters=counts["head"],
                flops=per_token,
                borrowed=borrowed,
                once=x - per_token * t,
            )
        )
    return tuple(pieces)
