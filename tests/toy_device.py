"""A device that needs no hardware and is not the processor: `toy`, whose tensors may not meet those of the processor.

A tensor on it is a wrapper around one of the processor: torch computes underneath, and refuses what a graphics card
would refuse (two devices in one operation, NumPy without `.cpu()`). `register()` makes it known to torch; it lasts as
long as the process.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "toy"
aten = torch.ops.aten
# Operations that take tensors of two devices on a real card, too: a copy, and indices on the processor.
MIXING = {aten.copy_, aten._to_copy, aten._copy_from, aten.index, aten.index_put_, aten.index_put, aten.set_}


class Toy(Tensor):
    """A tensor on the toy device; `raw` holds its numbers."""

    raw: Tensor
    wide = True  # does it have float64? MPS has none

    @staticmethod
    def __new__(cls, raw: Tensor) -> Toy:
        if raw.dtype == torch.float64 and not cls.wide:
            raise TypeError("Cannot convert a tensor to float64 dtype: the device has none")
        made: Toy = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.size(), raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=torch.device(NAME, 0)
        )
        made.raw = raw.detach()
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Toy({self.raw!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied: Tensor = Toy(self.raw.clone())
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]  # type: ignore[no-any-return]

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        return self.raw.tolist()

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.raw = value.raw  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        _refuse_mixed(function, (args, kwargs))
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = torch.device("cpu") if torch.device(device).type == NAME else device
        wrappers: dict[int, Tensor] = {}

        def inner(x: Any) -> Any:
            if isinstance(x, Toy):
                wrappers[id(x.raw)] = x
                return x.raw
            return x

        def outer(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) in wrappers:  # written in place
                wrapper = wrappers[id(x)]
                assert wrapper.shape == x.shape, f"{function} changed a shape in place"
                return wrapper
            return x if device is not None and torch.device(device).type == "cpu" else Toy(x)

        result = function(*tree_map(inner, args), **tree_map(inner, kwargs))
        if function._overloadpacket is aten.copy_:
            return args[0]
        return tree_map(outer, result)


def _refuse_mixed(function: Any, values: Any) -> None:
    """What torch refuses: tensors of two devices; a number without axes may come from the processor."""
    devices = set()

    def note(x: Any) -> None:
        if isinstance(x, Tensor) and (isinstance(x, Toy) or x.dim()):
            devices.add(x.device.type)

    tree_map(note, values)
    if len(devices) > 1 and function._overloadpacket not in MIXING:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {function} got {sorted(devices)}")


# What torch asks of the module of a device. Numbers are drawn by the processor's own generator.
MODULE = types.SimpleNamespace(
    is_initialized=lambda: True,
    is_available=lambda: True,
    current_device=lambda: 0,
    device_count=lambda: 1,
    _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda seed: None,
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
)


@functools.cache
def register() -> torch.library.Library:
    """Make the device known; what makes tensors from nothing makes them on the processor, and wraps them."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=MODULE)
    library = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or not hasattr(aten, packet):
            continue
        try:
            operation = getattr(getattr(aten, packet), overload or "default")
        except (AttributeError, RuntimeError):
            continue
        schema = operation._schema
        takes = {argument.name: str(argument.type) for argument in schema.arguments}
        returns = [str(each.type) for each in schema.returns]
        if "device" in takes and returns == ["Tensor"] and not any("Tensor" in kind for kind in takes.values()):
            library.impl(name.removeprefix("aten::"), _factory(operation), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    return library


def _factory(operation: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Tensor:
        args = tuple(torch.device("cpu") if isinstance(each, torch.device) else each for each in args)
        return Toy(operation(*args, **{**kwargs, "device": torch.device("cpu")}))

    return make


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    (target.raw if isinstance(target, Toy) else target).copy_(source.raw if isinstance(source, Toy) else source)
    return target
