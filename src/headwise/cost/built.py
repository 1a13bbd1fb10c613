"""A shape out of a model of transformers that is built without memory, on the meta device, and run there.

Parameters are counted on its modules; its heads are where `watch` finds them; its own cache says what is kept of a
text; FLOPs are those of torch's counter. Two prompts of different lengths, whole chunks of those that a linear
attention works through, and a step behind each, tell what grows with the text, and how.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from headwise.cost.shape import Experts, Flops, Heads, Kept, Layer, ModelShape, Outside
from headwise.errors import HeadwiseError, first_line
from headwise.models.ask import cache_name, context_of
from headwise.models.hf import AnyCache, meta_model, quiet
from headwise.models.hook import hooked
from headwise.models.sites import NUMBER, Site, sites_of

# tokens that a linear attention works through at a time: where its config says it, and where it does not
CHUNKS = ("chunk_size", "mamba_chunk_size")
CHUNK = 64
# where a model hands out what it keeps, and fields of configs with the experts of a token
CACHES = ("cache", "past_key_values", "cache_params", "state")
ROWS = ("keys", "values")
ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of a run without data, for each of the modules that are running.

    What data would decide is decided as if all of it were zeros: no expert of a loop is met, no token is padding.
    Layers repeat one another, and sizes of results take long to derive: they are `known`, by function and arguments.
    """

    def __init__(self, known: dict[Any, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known
        self.running: list[nn.Module] = []
        self.flops: Counter[nn.Module] = Counter()

    def enter(self, module: nn.Module, _: Any) -> None:
        self.running.append(module)

    def leave(self, *_: Any) -> None:
        self.running.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        kwargs = kwargs or {}
        if name == "aten::_local_scalar_dense" and args[0].is_meta:
            return 0
        if name == "aten::nonzero" and args[0].is_meta:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.long)
        # of numbers on the processor all may decide the size of a result
        key = (func, _sizes(args), _sizes([*kwargs.items()]))
        if key in self.known:
            (size, stride, dtype), flops = self.known[key]
            out = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        else:
            out = func(*args, **kwargs)
            count = flop_registry.get(func._overloadpacket)
            flops = count(*args, **kwargs, out_val=out) if count else 0
            is_pure = not (func.is_view or func._schema.is_mutable)
            if is_pure and isinstance(out, Tensor) and out.is_meta:
                self.known[key] = _sizes(out), flops
        for module in self.running if flops else ():
            self.flops[module] += flops
        return out


def _sizes(value: Any) -> Any:
    """What of the arguments of a function decides the size of its result."""
    if isinstance(value, Tensor):
        is_meta = value.is_meta
        return (value.shape, value.stride(), value.dtype) if is_meta else object()
    if isinstance(value, list | tuple):
        return tuple(map(_sizes, value))
    return type(value), value


@dataclass
class Run:
    """One run: FLOPs of each module, those inside it among them, and what is kept."""

    seen: int  # tokens before and in it
    flops: Counter[nn.Module]
    name: str  # of the cache among the arguments of the model
    cache: Any
    kept: list[dict[str, Tensor]]  # of each layer, see `Stack.kept`

    def within(self, modules: Iterable[nn.Module]) -> int:
        """FLOPs of modules that lie side by side."""
        return sum(self.flops[module] for module in modules)


class Stack:
    """A model and the layers of its decoder: lists of modules side by side, whose modules of one number are one layer.

    They are the lists that hold the most parameters, of those that lie in no other list.
    """

    def __init__(self, model: Any) -> None:
        lists = defaultdict(list)
        for path, module in model.named_modules():
            is_list = isinstance(module, nn.ModuleList) and len(module)
            if is_list and not NUMBER.search(path):
                lists[path.rpartition(".")[0], len(module)].append(module)
        if not lists:
            raise HeadwiseError(
                f"{type(model).__name__} has no list of layers; it cannot be priced"
            )
        self.model = model
        self.table = model.get_input_embeddings()
        self.known: dict[Any, Any] = {}  # see Counting
        largest = max(lists.values(), key=lambda each: sum(map(_size, each)))
        # HRM runs two stacks in turn, of layers of one class; an encoder is a stack, too, and no part of the decoder
        if not getattr(model.config, "is_encoder_decoder", False):
            for each in chain(*lists.values()):
                is_alike = type(each[0]) is type(largest[0][0])
                if is_alike and len(each) == len(largest[0]) and each not in largest:
                    largest.append(each)
        self.tops = list(zip(*largest, strict=True))  # of each layer
        self.modules = [
            [each for top in tops for each in top.modules()] for tops in self.tops
        ]
        self.sites: dict[int, Site] = {}
        place = {each: n for n, inner in enumerate(self.modules) for each in inner}
        # of several in a layer the first that is no cross attention
        with suppress(HeadwiseError):
            for site in sites_of(model):
                if not site.cross:
                    self.sites.setdefault(place.get(site.module, -1), site)

    def run(self, tokens: int, before: Run | None = None) -> Run:
        """Read a prompt, or write one token behind it."""
        counting = Counting(self.known)
        # a module that raises is left, too
        left = partial(register_module_forward_hook, always_call=True)
        hooks: list[Any] = [
            (register_module_forward_pre_hook, counting.enter),
            (left, counting.leave),
        ]
        ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
        past = (before.name, before.cache) if before else ()
        try:
            with hooked(hooks), torch.no_grad(), quiet(), counting:
                name, cache = called(self.model, ids, *past)
        except Exception as error:
            raise HeadwiseError(
                f"a {self.model.config.model_type} of this config does not run without data: {first_line(error)}"
            ) from None
        return Run(
            seen=tokens + (before.seen if before else 0),
            flops=counting.flops,
            name=name,
            cache=cache,
            kept=self.kept(cache),
        )

    def kept(self, cache: Any) -> list[dict[str, Tensor]]:
        """What the layers keep, by name, in a cache; each tensor once.

        Layers that run several times in a pass keep several records: with n layers, that of layer m is every n-th from
        number m on.
        """
        cache = _of_decoder(cache)
        in_modules = any(hasattr(m, "_setup_cache") for m in self.model.modules())
        # Recurrent Gemma; RWKV
        if in_modules or not (cache is None or hasattr(cache, "layers")):
            raise HeadwiseError(
                f"a {self.model.config.model_type} keeps states outside the cache of transformers; they have no price"
            )
        records: list[dict[str, Any]] = [{} for _ in self.tops]
        if cache is None:
            return records
        of_layers = [dict(vars(part)) for part in cache.layers]
        records = of_layers + records[len(of_layers) :]
        for name, values in vars(cache).items():
            if isinstance(values, list) and name != "layers":  # MiniMax's states
                for record, value in zip(records, values, strict=False):
                    record[name] = value
        kept = []
        for record in records:
            names: dict[int, tuple[str, Tensor]] = {}
            for name, tensor in _tensors(record):
                names.setdefault(id(tensor), (name, tensor))
            kept.append(dict(names.values()))
        return kept


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _of_decoder(cache: Any) -> Any:
    # beside that of cross attention
    return getattr(cache, "self_attention_cache", cache)


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of numbers in a record, by their paths."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
        yield name, value
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _tensors(inner, f"{name}.{key}".strip("."))


def called(
    model: Any, ids: Tensor, name: str = "", cache: Any = None
) -> tuple[str, Any]:
    """Call a model of transformers on ids (B,T): the name of its cache among its arguments, and the cache."""
    arguments = {"input_ids": ids, "use_cache": True} | ({name: cache} if name else {})
    try:
        out = model(**arguments)
    except (ValueError, IndexError):
        if name:
            raise
        return called(model, ids, cache_name(model), AnyCache(config=model.config))
    for key in CACHES:
        if getattr(out, key, None) is not None:
            return key, getattr(out, key)
    return name, cache


def shape_of_config(fields: Mapping[str, Any]) -> ModelShape:
    """The shape of the model of a config. Raises HeadwiseError, with the reason, for what cannot be built or run."""
    model, part = meta_model(fields)
    stack = Stack(model)
    config = model.config.get_text_config(decoder=True)
    sizes = [getattr(config, name, None) for name in CHUNKS]
    chunk = next(filter(None, sizes), CHUNK)
    positions = context_of(model)
    if positions is not None:
        chunk = min(chunk, positions // 2)
    runs = [stack.run(chunk), stack.run(2 * chunk)]
    if not runs[0].within(chain(*stack.tops)):
        raise HeadwiseError(
            f"of a {model.config.model_type} the largest list of layers does not read ids; price its decoder alone"
        )
    steps = []
    if any(runs[0].kept):
        # ProphetNet has a cache, and no step of one token beside it
        with suppress(HeadwiseError):
            steps = [stack.run(1, run) for run in runs]
    counts = _parameters(stack)
    numbers = range(len(stack.tops))
    layers = [Part(stack, runs, n).layer(counts[n], steps) for n in numbers]
    return ModelShape(
        family=str(fields["model_type"]),
        d_model=stack.table.weight.shape[-1],
        layers=tuple(layers),
        outside=_outside(stack, counts[-1], runs),
        positions=positions,
        generates=any(layer.kept for layer in layers),
        notes=(f"priced is {part}",) if part else (),
        way="built",
    )


class Part:
    """One layer of a model that was built."""

    def __init__(self, stack: Stack, runs: Sequence[Run], n: int) -> None:
        self.stack = stack
        self.n = n
        self.runs = runs
        self.site = stack.sites.get(n)
        self.tops = stack.tops[n]
        numbers = range(n, len(runs[1].kept), len(stack.tops))
        self.config = stack.model.config.get_text_config(decoder=True)
        self.kept = [part for number in numbers for part in self._kept(number)]
        self.entries = runs[1].kept[n]
        self.window, self.every = self._limits(n)

    def _limits(self, number: int) -> tuple[int | None, int | None]:
        """The window of a part of the cache, and how many tokens a block has that is kept as one; None without."""
        layers = getattr(_of_decoder(self.runs[0].cache), "layers", ())
        part: Any = layers[number] if number < len(layers) else None
        window = part.sliding_window if getattr(part, "is_sliding", False) else None
        return window, getattr(part, "compress_rate", None)

    def _kept(self, number: int) -> list[Kept]:
        """How what is kept in a record grows with the text, from two prompts."""
        first, second = self.runs
        window, every = self._limits(number)
        usual = 8 * self.stack.table.weight.element_size()
        # laws, as if of no numbers, and their numbers
        parts: Counter[Kept] = Counter()
        for name, entry in second.kept[number].items():
            size = entry.numel()
            bits = 8 * entry.element_size()
            # what has other bits than the model's has them whatever its format is
            fixed = None if bits == usual else bits
            law = Kept(values=0, heads=name in ROWS, bits=fixed)
            if law.heads and window is not None:
                rows = window - 1
                values = size // min(second.seen, rows) if rows else 0
                law = replace(law, rows=rows)
            elif every is not None and name.startswith(("compressed", "buffer")):
                values = size // entry.shape[1] if entry.shape[1] else entry.shape[-1]
                is_open = name.startswith("buffer")
                law = replace(law, every=every, open_block=is_open)
            else:
                grown = size - first.kept[number].get(name, entry).numel()
                values, rest = divmod(grown, second.seen - first.seen)
                if rest or grown < 0:
                    raise HeadwiseError(
                        f"L{self.n} keeps {size} numbers of {second.seen} tokens as {name}, and {grown} fewer of "
                        f"{first.seen}: how they grow is not known"
                    )
                state = replace(law, heads=False, grows=False)
                parts[state] += size - values * second.seen
            parts[law] += values
        return [replace(law, values=values) for law, values in parts.items() if values]

    def layer(self, counts: Counter[str], steps: Sequence[Run]) -> Layer:
        heads = self.heads(counts["attention"])
        experts = self.experts()
        # Of two prompts, the second twice as long: a T + b T^2. A chunk costs a little more behind another.
        (x, t), (y, u) = ((run.within(self.tops), run.seen) for run in self.runs)
        pair = max(0, (y - 2 * x) // (2 * t * t)) if heads else 0
        reading = writing = Flops((y - pair * u * u) // u, pair)
        if steps and heads:
            (x, t), (y, u) = ((run.within(self.tops), run.seen) for run in steps)
            # else a window is full before the second step
            if heads.seen(u) == u:
                pair = max(0, (y - x) // (u - t))
            writing = Flops(x - pair * heads.seen(t), pair)
        elif steps:
            writing = Flops(steps[0].within(self.tops), 0)
        loops = filter(_is_experts, self.stack.modules[self.n])
        if experts and not self.runs[1].within(loops):
            # a loop over experts, of which a run without data meets none
            more = experts.active * experts.matrices
            reading = reading.plus(more)
            writing = writing.plus(more)
        kind = self.kind(heads)
        if heads and heads.latent is not None and kind == "latent":
            # what is kept of a token can be read as a key, and its latent alone as a value
            module: Any = self.site and self.site.module
            read_as = heads.latent + module.kv_lora_rank
            writing = Flops(reading.token, 2 * heads.n_heads * read_as)
        return Layer(
            name=f"L{self.n}",
            kind=kind,
            attention=heads,
            kept=tuple(self.kept),
            mixer_parameters=counts["mixer"],
            feed_forward_parameters=counts["feed-forward"],
            norm_parameters=counts["norms"],
            experts=experts,
            reading=reading,
            writing=writing,
        )

    def heads(self, parameters: int) -> Heads | None:
        if self.site is None:
            return None
        module = self.site.module
        config = self.config
        n_heads = self.site.n_heads or getattr(config, "num_attention_heads", 0)
        latent = None
        n_kv_heads = n_heads
        head_dim = value_dim = getattr(module, "head_dim", 0)
        keys, values = map(self.entries.get, ROWS)
        if keys is not None and isinstance(getattr(module, "kv_lora_rank", None), int):
            latent = sum(part.values for part in self.kept if part.heads)
            head_dim = getattr(module, "qk_head_dim", keys.shape[-1])
            value_dim = getattr(module, "v_head_dim", keys.shape[-1])
        elif keys is not None and keys.ndim == 4:
            n_kv_heads = keys.shape[1]
            head_dim = keys.shape[3]
            value_dim = head_dim if values is None else values.shape[3]
        elif not head_dim and (query := self.site.weights("q")) is not None:
            head_dim = value_dim = len(query) // (n_heads or 1)
        key = 0  # parameters of a key/value head; a latent is of all heads
        if latent is None:
            for matrix in filter(None, map(self.site.matrices.get, "kv")):
                key += matrix.weight.numel()
                key += 0 if matrix.bias is None else matrix.bias.numel()
            key //= n_kv_heads or 1
        inner = [each for each in _attention(self.site) if each not in self.tops]
        if latent is None and not key:
            # W_Q, W_K and W_V are one matrix
            linear = [each for each in inner if isinstance(each, nn.Linear)]
            has_bias = any(each.bias is not None for each in linear)
            rows = self.stack.table.weight.shape[-1] + has_bias
            key = rows * (head_dim + value_dim)
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
            kv_head_parameters=key,
            parameters=parameters,
        )

    def kind(self, heads: Heads | None) -> str:
        """The kind of the layer by what it keeps."""
        names = []
        if heads and any(part.heads for part in self.kept):
            is_indexed = any("ind" in name or "idx" in name for name in self.entries)
            if self.every:
                names.append("compressed")
            elif heads.latent is not None:
                names.append("latent")
            elif not is_indexed:
                is_cut = "chunked" if heads.chunked else "sliding"
                names.append("full" if heads.window is None else is_cut)
            names += ["indexed"] if is_indexed else []
        others = [name for name in self.entries if name not in ROWS]
        # beside rows, numbers that do not grow with the text
        if others and not self.every and not all(part.grows for part in self.kept):
            is_conv = all("conv" in name for name in others)
            names.append("conv" if is_conv else "linear")
        if not names and heads:
            is_shared = not self.kept and any(self.runs[1].kept)
            names.append("shared" if is_shared else "full")
        return " + ".join(names) or "none"

    def experts(self) -> Experts | None:
        """The experts of the layer, and how many a token is sent to, by the config."""
        module = next(filter(_is_experts, self.stack.modules[self.n]), None)
        if module is None:
            return None
        of_one = list(module.parameters())
        count = next(p.shape[0] for p in of_one if p.ndim == 3)
        named = [getattr(self.config, name, None) for name in ACTIVE]
        active = next((each for each in named if isinstance(each, int)), 1)
        return Experts(
            active=min(active, count),
            count=count,
            parameters=sum(p.numel() for p in of_one) // count,
            matrices=sum(p.numel() for p in of_one if p.ndim == 3) // count,
        )


def _attention(site: Site) -> list[nn.Module]:
    """The modules of an attention; W_O may stand beside it."""
    beside = site.projection.modules() if site.projection else ()
    return [*site.module.modules(), *beside]


def _is_experts(module: nn.Module) -> bool:
    """Does it hold the weights of all experts of a layer, as tensors of three axes?"""
    is_named = type(module).__name__.endswith("Experts")
    return is_named and any(p.ndim == 3 for p in module.parameters(recurse=False))


def _parameters(stack: Stack) -> dict[int, Counter[str]]:
    """Parameters of each layer by what has them, and under -1 those outside, each once."""
    roles = {}
    for module in stack.model.modules():
        is_table = isinstance(module, nn.Embedding)
        roles[module] = -1, "embeddings" if is_table else "others"
    roles[stack.model.get_output_embeddings()] = -1, "head"
    for n, modules in enumerate(stack.modules):
        roles |= dict.fromkeys(modules, (n, "feed-forward"))
        site = stack.sites.get(n)
        tops = stack.tops[n]
        is_inside = site is not None and site.module in tops
        mixer = n, "attention" if is_inside else "mixer"
        for module in modules:
            # what stands in the place of an attention knows the number of its layer, for its part of the cache
            if module not in tops and isinstance(
                getattr(module, "layer_idx", None), int
            ):
                roles |= dict.fromkeys(module.modules(), mixer)
        if site and not is_inside:
            roles |= dict.fromkeys(_attention(site), (n, "attention"))
    counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
    counted: set[nn.Parameter] = set()
    # the table first: a head may be tied to it
    for module in (stack.table, *stack.model.modules()):
        n, part = roles[module]
        is_norm = "norm" in type(module).__name__.lower()
        if is_norm and part in ("others", "feed-forward"):
            part = "norms"
        weights = {*module.parameters(recurse=False)} - counted
        counts[n][part] += sum(p.numel() for p in weights)
        counted |= weights
    return counts


def _outside(stack: Stack, counts: Counter[str], runs: Sequence[Run]) -> Outside:
    """What stands outside the layers."""
    (x, t), (y, u) = (
        (run.flops[stack.model] - run.within(chain(*stack.tops)), run.seen)
        for run in runs
    )
    per_token = (y - x) // (u - t)
    head = stack.model.get_output_embeddings()
    table = stack.table.weight
    is_tied = getattr(head, "weight", None) is table
    tables = set()
    for path, module in stack.model.named_modules():
        is_table = isinstance(module, nn.Embedding) and "encoder." not in path
        if is_table and module not in chain(*stack.modules):
            tables.add(module.weight)
    return Outside(
        embeddings=counts["embeddings"],
        row=sum(weight.shape[-1] for weight in tables),
        norms=counts["norms"],
        others=counts["others"],
        head=counts["head"] if head is not None or x else None,
        borrowed=is_tied * table.numel(),
        flops=per_token,
        once=x - per_token * t,
    )
