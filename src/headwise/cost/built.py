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
from dataclasses import dataclass, replace
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
# tokens that a linear attention works through at a time, where its config does not say it
CHUNK = 64
# where a model hands out what it keeps, and fields of configs with the experts of a token
CACHES = ("cache", "past_key_values", "cache_params", "state", "mems")
ROWS = ("keys", "values")
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls += 1
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::_local_scalar_dense" and args[0].is_meta:
            return 0
        if name == "aten::nonzero" and args[0].is_meta:
            return torch.empty((0, args[0].dim()), dtype=torch.long, device="meta")
        key = None
        if not any(
            value.alias_info
            for value in (*func._schema.returns, *func._schema.arguments)
        ):
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
    plain = isinstance(
        value, int | float | str | torch.dtype | torch.device | torch.layout
    )
    return (type(value), value) if plain or value is None else None


class Stack:
    """The layers of a decoder: lists of modules side by side, whose modules of one number are one layer.

    They are the lists that hold the most parameters, of those that lie in no other list.
    """

    def __init__(self, model: nn.Module) -> None:
        lists: defaultdict[tuple[str, int], list[nn.ModuleList]] = defaultdict(list)
        for path, module in model.named_modules():
            numbered = any(part.isdigit() for part in path.split("."))
            if isinstance(module, nn.ModuleList) and len(module) and not numbered:
                lists[path.rpartition(".")[0], len(module)].append(module)
        if not lists:
            raise HeadwiseError(
                f"{type(model).__name__} has no list of layers; it cannot be priced"
            )
        largest = max(lists.values(), key=lambda each: _size(*each))
        self.tops = list(zip(*largest, strict=True))  # of each layer
        self.place: dict[nn.Module, int] = {}  # any module inside -> its layer
        for n, tops in enumerate(self.tops):
            for top in tops:
                self.place |= dict.fromkeys(top.modules(), n)
        self.known: dict[Any, tuple[Any, int]] = {}  # see Counting


def _size(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


@dataclass
class Run:
    """One run: FLOPs by name ("3" is a layer, "3e" its experts, "" what is outside), and what is kept."""

    tokens: int
    seen: int  # keys before and in it
    flops: Counter[str]
    calls: int
    bits: int  # of a number of the model
    name: str  # of the cache among the arguments of the model
    cache: Any
    kept: list[dict[str, Tensor]]  # of each layer

    def layer_flops(self, n: int) -> int:
        return self.flops[str(n)] + self.flops[f"{n}e"]


def shape_of_fields(fields: Mapping[str, Any]) -> ModelShape:
    """The shape of the model of a config. Raises HeadwiseError, with the reason, for what cannot be built or run."""
    model, part = meta_model(fields)
    stack = Stack(model)
    runs = [_run(model, stack, tokens) for tokens in SHORT]
    steps: list[Run] = []
    if any(runs[0].kept):
        with suppress(
            HeadwiseError
        ):  # CPM-Ant has a cache, and no step of one token beside it
            steps = [_run(model, stack, 1, run) for run in runs]
    config = model.config.get_text_config(decoder=True)
    sites: dict[
        int, Site
    ] = {}  # of several in a layer the first that is no cross attention
    with suppress(HeadwiseError):
        for site in sites_of(model):
            if not site.cross:
                sites.setdefault(stack.place.get(site.module, -1), site)
    of_layer = [
        Built(config, stack, runs, n, sites.get(n)) for n in range(len(stack.tops))
    ]
    lengths = runs
    # A layer that fills up a chunk of tokens costs the same however few there are; one that loops over them does not.
    is_loop = runs[1].calls - runs[0].calls > SHORT[0]
    if not is_loop and any(
        built.has_state and built.window is None for built in of_layer
    ):
        named = (
            getattr(config, name, None) for name in ("chunk_size", "mamba_chunk_size")
        )
        chunk: int = next(filter(None, named), CHUNK)
        lengths = [_run(model, stack, tokens) for tokens in (chunk, 2 * chunk)]
    counts = _parameters(model, of_layer, stack)
    layers = tuple(built.layer(counts[built.n], lengths, steps) for built in of_layer)
    return ModelShape(
        family=str(fields["model_type"]),
        d_model=_table(model).weight.shape[-1],
        layers=layers,
        pieces=_pieces(model, counts[-1], lengths),
        positions=context_of(model),
        generates=any(layer.kept for layer in layers),
        way="built",
        notes=(f"priced is {part}",) if part else (),
    )


def _run(model: Any, stack: Stack, tokens: int, before: Run | None = None) -> Run:
    """Read a prompt, or write one token behind it."""
    counting, handles = Counting(stack.known), []

    def enter(name: str) -> Any:
        return lambda *_: counting.inside.append(name)

    def leave(*_: Any) -> None:
        counting.inside.pop()

    for module, n in stack.place.items():
        is_top = module in stack.tops[n]
        if is_top or _is_experts(module):
            name = str(n) if is_top else f"{n}e"
            handles.append(module.register_forward_pre_hook(enter(name)))
            handles.append(module.register_forward_hook(leave))
    ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    try:
        with torch.no_grad(), quiet(), counting:
            name, cache = called(
                model, ids, *((before.name, before.cache) if before else ())
            )
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HeadwiseError(
            f"a {model.config.model_type} of this config does not run without data: {reason}"
        ) from None
    finally:
        for handle in handles:
            handle.remove()
    seen = tokens + (before.seen if before else 0)
    kept = kept_by_layer(cache, model, stack)
    bits = 8 * _table(model).weight.element_size()
    return Run(tokens, seen, counting.flops, counting.calls, bits, name, cache, kept)


def _table(model: Any) -> Any:
    """The table of the tokens; the first of several, as where MusicGen reads several codes of a sound."""
    table = model.get_input_embeddings()
    return table[0] if isinstance(table, nn.ModuleList) else table


def called(
    model: Any, ids: Tensor, name: str = "", cache: Any = None
) -> tuple[str, Any]:
    """Call a model of transformers on ids (B,T): the name of its cache among its arguments, and the cache."""
    arguments = {"input_ids": ids, "use_cache": True}
    if "lang_ids" in parameters_of(
        model
    ):  # X-MOD has an adapter for each language, and runs one
        arguments["lang_ids"] = torch.zeros(len(ids), dtype=torch.long)
    if name:
        arguments[name] = cache
    try:
        out = model(**arguments)
    except (ValueError, IndexError):
        if name:
            raise
        return called(model, ids, cache_name(model), AnyCache(config=model.config))
    except RuntimeError:  # a class that mixes number formats or devices, or reads several codes of a sound at a time
        arguments["input_ids"] = ids.expand(
            getattr(model.config, "num_codebooks", 1), -1
        )
        with ids.device:
            out = model.to(torch.float32)(**arguments)
    for key in CACHES:
        if getattr(out, key, None) is not None:
            return key, getattr(out, key)
    if not name and any(hasattr(module, "_setup_cache") for module in model.modules()):
        # Recurrent Gemma has states in its modules, and keys and values in a cache that is handed to it
        return called(model, ids, cache_name(model), AnyCache(config=model.config))
    return name, cache


def kept_by_layer(
    cache: Any, model: nn.Module, stack: Stack
) -> list[dict[str, Tensor]]:
    """What each layer keeps, by name, in a cache and in the model's modules; each tensor once."""
    n_layers = len(stack.tops)
    records: list[dict[str, Any]] = [{} for _ in range(n_layers)]
    cache = _of_decoder(cache)
    if isinstance(cache, tuple) and len(cache) == n_layers:  # XLNet
        for record, value in zip(records, cache, strict=True):
            record["memory"] = value
    elif hasattr(
        cache, "layers"
    ):  # a cache of transformers: lists with an entry for each layer
        lists = {
            name: value
            for name, value in vars(cache).items()
            if isinstance(value, list)
        }
        for name, values in lists.items():
            for record, value in zip(records, values, strict=False):
                record |= vars(value) if name == "layers" else {name: value}
    else:  # of all layers together: each has an equal part
        for name, tensor in _tensors(getattr(cache, "__dict__", cache)):
            for record in records:
                record[name] = tensor.flatten()[: tensor.numel() // n_layers]
    for number, (module, n) in enumerate(
        stack.place.items()
    ):  # Recurrent Gemma's are in its modules
        for name, value in vars(module).items():
            if "state" in name:
                records[n][f"{number}.{name}"] = value
    kept = []
    for record in records:
        names = {
            id(tensor): (name, tensor) for name, tensor in reversed([*_tensors(record)])
        }
        kept.append(dict(reversed(names.values())))
    return kept


def _of_decoder(cache: Any) -> Any:
    return getattr(
        cache, "self_attention_cache", cache
    )  # beside that of cross attention


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of numbers in a record, by their paths."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
        yield name, value
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _tensors(inner, f"{name}.{key}".strip("."))


class Built:
    """One layer of a model that was built."""

    def __init__(
        self, config: Any, stack: Stack, runs: Sequence[Run], n: int, site: Site | None
    ) -> None:
        self.n, self.config, self.runs, self.site = n, config, runs, site
        self.modules = [module for top in stack.tops[n] for module in top.modules()]
        layers = getattr(_of_decoder(runs[0].cache), "layers", ())
        cache = layers[n] if n < len(layers) else None
        is_sliding = getattr(cache, "is_sliding", False)
        self.window: int | None = (
            getattr(cache, "sliding_window", None) if is_sliding else None
        )
        self.every: int | None = getattr(cache, "compress_rate", None)
        self.entries = runs[1].kept[n]
        self.kept = self._kept()
        others = [name for name in self.entries if name not in ROWS]
        # beside rows, numbers that do not grow with the text
        self.has_state = bool(others) and not all(part.grows for part in self.kept)
        # what stands in the place of an attention knows the number of its layer, for its part of the cache
        self.mixers = {
            part
            for module in self.modules
            if isinstance(getattr(module, "layer_idx", None), int)
            and module not in stack.tops[n]
            for part in module.modules()
        }
        self.attention: set[nn.Module] = set()
        if site is not None:
            around = [m for m in self.modules if site.module in m.modules()]
            # the innermost module around the one that computes the heads that holds W_O, too
            holders = [m for m in around if site.projection in set(m.modules())]
            inner = min(holders or around, key=lambda m: len(list(m.modules())))
            if inner not in stack.tops[n]:
                self.attention = set(inner.modules())

    def _kept(self) -> list[Kept]:
        """How what the layer keeps grows with the text, from two prompts."""
        first, second = self.runs
        parts: Counter[Kept] = Counter()  # laws, as if of no numbers, and their numbers
        for name, entry in self.entries.items():
            size, bits = entry.numel(), 8 * entry.element_size()
            # what has other bits than the model's has them whatever its format is
            law = Kept(
                values=0, heads=name in ROWS, bits=None if bits == second.bits else bits
            )
            if law.heads and self.window is not None:
                rows = self.window - 1
                values = size // min(second.tokens, rows) if rows else 0
                law = replace(law, rows=rows)
            elif self.every is not None and name.startswith(("compressed", "buffer")):
                values = size // entry.shape[1] if entry.shape[1] else entry.shape[-1]
                law = replace(
                    law, every=self.every, open_block=name.startswith("buffer")
                )
            else:
                grown = size - first.kept[self.n].get(name, entry).numel()
                values, rest = divmod(grown, second.tokens - first.tokens)
                if rest or grown < 0:
                    raise HeadwiseError(
                        f"L{self.n} keeps {size} numbers of {second.tokens} tokens as {name}, and {grown} fewer of "
                        f"{first.tokens}: how they grow is not known"
                    )
                # CPM-Ant adds tokens of its own to each text, so that not all that is kept need grow
                parts[replace(law, heads=False, grows=False)] += (
                    size - values * second.tokens
                )
                if name == "memory":  # XLNet's is of so many tokens at most
                    law = replace(law, rows=getattr(self.config, "mem_len", None))
            parts[law] += values
        return [replace(law, values=values) for law, values in parts.items() if values]

    def part(self, module: nn.Module) -> str:
        """What the parameters of a module inside the layer count as."""
        if module in self.attention:
            return "attention"
        if module in self.mixers:
            return "mixer" if self.site is None or self.attention else "attention"
        return "norms" if "norm" in type(module).__name__.lower() else "feed-forward"

    def layer(
        self, counts: Counter[str], lengths: Sequence[Run], steps: Sequence[Run]
    ) -> Layer:
        heads = self.heads(counts["attention"])
        experts = self.experts(lengths[1])
        # a T + b T^2 of prompts; without heads there are no pairs: a chunk costs a little more behind another one
        (x, t), (y, u) = ((run.layer_flops(self.n), run.tokens) for run in lengths)
        pair = max(0, (y * t - x * u) // (t * u * (u - t))) if heads else 0
        linear = (y - pair * u * u) // u
        step, step_pair = linear, pair
        if steps and self.window is not None and self.window <= SHORT[1]:
            # it was full before the second step
            step = steps[0].layer_flops(self.n) - pair * min(self.window, SHORT[0] + 1)
        elif steps:  # a + b S beside S keys
            (x, t), (y, u) = ((run.layer_flops(self.n), run.seen) for run in steps)
            step_pair = max(0, (y - x) // (u - t))
            step = x - step_pair * t
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
            pair=pair,
            step=step,
            step_pair=step_pair if heads else 0,
        )

    def heads(self, parameters: int) -> Heads | None:
        if self.site is None:
            return None
        module, config = self.site.module, self.config
        n_heads = self.site.n_heads or getattr(config, "num_attention_heads", 0)
        keys, values = map(self.entries.get, ROWS)
        latent, n_kv_heads = None, n_heads
        head_dim = value_dim = getattr(module, "head_dim", 0)
        if keys is not None and isinstance(getattr(module, "kv_lora_rank", None), int):
            latent = sum(part.values for part in self.kept if part.heads)
            head_dim = getattr(module, "qk_head_dim", keys.shape[-1])
            value_dim = getattr(module, "v_head_dim", keys.shape[-1])
        elif keys is not None and keys.ndim == 4:
            n_kv_heads, head_dim = keys.shape[1], keys.shape[3]
            value_dim = head_dim if values is None else values.shape[3]
        w_q, w_k, w_v, w_o = map(self.site.weights, "qkvo")
        if not head_dim and w_q is not None:
            head_dim = value_dim = len(w_q) // (n_heads or 1)
        query = sum(w.numel() for w in (w_q, w_o) if w is not None) // (n_heads or 1)
        key = sum(w.numel() for w in (w_k, w_v) if w is not None) // (n_kv_heads or 1)
        if key and any(
            isinstance(m, nn.Linear) and m.bias is not None for m in self.attention
        ):
            key += head_dim + value_dim
        matrices = (
            p
            for m in self.attention
            for p in m.parameters(recurse=False)
            if p.ndim == 2
        )
        types = getattr(config, "layer_types", None) or []
        return Heads(
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            window=self.window,
            causal=bool(self.kept) or getattr(config, "is_decoder", False),
            chunked=types[self.n : self.n + 1] == ["chunked_attention"],
            sink=any("sink" in name for name, _ in module.named_parameters()),
            latent=latent,
            query_head_parameters=query,
            kv_head_parameters=key,
            shared_parameters=0
            if latent
            else parameters - query * n_heads - key * n_kv_heads,
            parameters=parameters,
            weights=sum(p.numel() for p in matrices),
        )

    def kind(self, heads: Heads | None) -> str:
        """The kind of the layer by what it keeps."""
        names = []
        if heads is not None and any(part.heads for part in self.kept):
            is_indexed = any("ind" in name or "idx" in name for name in self.entries)
            if self.every:
                names.append("compressed")
            elif heads.latent is not None:
                names.append("latent")
            elif not is_indexed:
                is_sliding = heads.window is not None
                names.append(
                    "chunked" if heads.chunked else "sliding" if is_sliding else "full"
                )
            if is_indexed:
                names.append("indexed")
        if self.has_state and not self.every:
            is_conv = all("conv" in name for name in self.entries if name not in ROWS)
            names.append("conv" if is_conv else "linear")
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
            count, of_all, ndim = len(module), list(module[0].parameters()), 2
            shared_by = 1
        else:
            of_all, ndim = list(module.parameters()), 3
            shared_by = count = next(p.shape[0] for p in of_all if p.ndim == ndim)
        parameters = sum(p.numel() for p in of_all) // shared_by
        matrices = sum(p.numel() for p in of_all if p.ndim >= ndim) // shared_by
        told = (getattr(self.config, name, None) for name in ACTIVE)
        active = next((each for each in told if isinstance(each, int)), 1)
        if flops := run.flops[f"{self.n}e"]:
            active = round(flops / (2 * run.tokens * matrices))
        return Experts(
            count=count,
            active=min(active, count),
            parameters=parameters,
            matrices=matrices,
        )


def _is_experts(module: nn.Module) -> bool:
    """Does it hold the weights of all experts of a layer, as tensors of three axes or as a list?"""
    if isinstance(module, nn.ModuleList):
        return (
            "Expert" in type(module).__name__
            or "Expert" in type(next(iter(module), None)).__name__
        )
    is_named = type(module).__name__.endswith("Experts")
    return is_named and any(p.ndim == 3 for p in module.parameters(recurse=False))


def _parameters(
    model: Any, of_layer: Sequence[Built], stack: Stack
) -> dict[int, Counter[str]]:
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


def _pieces(
    model: Any, counts: Counter[str], lengths: Sequence[Run]
) -> tuple[Piece, ...]:
    """What stands outside the layers."""
    (x, t), (y, u) = ((run.flops[""], run.tokens) for run in lengths)
    per_token = (y - x) // (u - t)
    head, table = model.get_output_embeddings(), _table(model)
    is_tied = getattr(head, "weight", None) is table.weight
    borrowed = math.prod(table.weight.shape) if is_tied else 0
    pieces = [
        Piece(
            part="embeddings",
            parameters=counts["embeddings"],
            row=table.weight.shape[-1],
        ),
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
