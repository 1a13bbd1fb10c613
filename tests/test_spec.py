"""AttentionSpec: defaults, sizes derived from them, and what it refuses."""

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from cases import refuses, refuses_table, rows

import headwise as hw
from headwise.spec import Sizes, check_shapes

Spec = hw.AttentionSpec


def test_sizes_follow_and_are_counted() -> None:
    spec = Spec(d_model=21, n_heads=3)
    assert (spec.n_kv_heads, spec.head_dim, spec.value_dim) == (3, 7, 7)
    assert (spec.d_in, spec.d_context, spec.d_out) == (21, 21, 21)
    assert (spec.q_bias, spec.kv_bias, spec.out_bias, spec.out_proj, spec.qk_norm, spec.sink) == (0, 0, 0, 1, 0, 0)
    assert (spec.mask, spec.rope, spec.softcap, spec.dropout) == (None, None, None, 0)
    spec = wide()
    assert (spec.q_dim, spec.k_dim, spec.v_dim, spec.joined_dim) == (42, 14, 22, 66)
    assert spec.cache_values_per_token == 2 * (7 + 11)
    assert spec.kv_index == (0, 0, 0, 1, 1, 1)
    # How many parameters there are is held against those of layers, in layer/test_matrix.py and test_layer.py.
    gpt2 = Spec(d_model=768, n_heads=12, q_bias=True, kv_bias=True, out_bias=True)
    assert gpt2.n_parameters == 4 * 768 * 768 + 4 * 768


@pytest.mark.parametrize(("fields", "name", "size"), rows("sizes_that_follow"))
def test_a_size_follows_another(fields: dict, name: str, size: int) -> None:
    assert getattr(Spec(d_model=21, n_heads=3, **fields), name) == size


def wide() -> hw.AttentionSpec:
    return Spec(d_model=5, n_heads=6, n_kv_heads=2, head_dim=7, value_dim=11, d_in=13, d_context=17, d_out=19)


def test_specs_are_values() -> None:
    with pytest.raises(FrozenInstanceError):
        wide().n_heads = 3  # type: ignore[misc]
    assert {wide(): 1}[wide()] == 1
    spec = Spec(d_model=21, n_heads=3).replace(d_model=22, mask=hw.Causal())
    assert (spec.d_model, spec.head_dim, spec.d_in, spec.mask) == (22, 7, 21, hw.Causal())
    refuses(lambda: wide().replace(n_kv_heads=4), "n_kv_heads=4 does not divide n_heads=6")
    with pytest.raises(TypeError, match="n_head"):
        wide().replace(n_head=4)
    with pytest.raises(TypeError, match="positional"):
        Spec(30, 6)  # type: ignore[misc]


def spec(**fields: Any) -> Spec:
    return Spec(**{"d_model": 30, "n_heads": 6, **fields})


def test_refused() -> None:
    refuses_table("spec", globals(), exact=True)


def test_fine_sizes() -> None:
    assert Spec(d_model=100, n_heads=6, head_dim=17).q_dim == 102
    of_numpy = Spec(d_model=np.int64(30), n_heads=np.int32(6), n_kv_heads=np.int64(2))
    assert of_numpy == Spec(d_model=30, n_heads=6, n_kv_heads=2) and type(of_numpy.n_kv_heads) is int
    assert Spec(d_model=30, n_heads=6, rope=hw.RoPE(dim=4)).head_dim == 5
    assert check_shapes((2, 6, 5, 7), (2, 3, 11, 7), (2, 3, 11, 13)) == Sizes(B=2, H=6, G=3, T=5, S=11, D=7, E=13)


def test_rope_refuses() -> None:
    refuses_table("rope", globals(), exact=True)


def test_reprs() -> None:
    assert repr(Spec(d_model=21, n_heads=3, head_dim=7, d_out=21)) == "AttentionSpec(d_model=21, n_heads=3)"
    spec = wide().replace(kv_index=(0, 1, 1, 1, 0, 0), rope=hw.RoPE(31.0, dim=2), mask=hw.Causal(), scale=0.5)
    assert repr(spec) == (
        "AttentionSpec(d_model=5, n_heads=6, n_kv_heads=2, kv_index=(0, 1, 1, 1, 0, 0), head_dim=7, value_dim=11, "
        "d_in=13, d_context=17, d_out=19, mask=Causal(offset=None), rope=RoPE(theta=31.0, dim=2), scale=0.5)"
    )
    names = {name: getattr(hw, name) for name in ("AttentionSpec", "Causal", "RoPE")}
    assert eval(repr(spec), names) == spec
