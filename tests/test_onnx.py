"""The ONNX operator Attention: all cases that the `onnx` package tests, on every path."""

from dataclasses import replace

import numpy as np
import pytest
from cases import every
from helpers import PATHS

# Version 1.23 corrected the cases: before it a causal mask did not count the keys of a cache kept outside, and a query
# that may see nothing was to give NaN.
pytest.importorskip("onnx", minversion="1.23", reason="onnx>=1.23 is absent, so its attention cases are not run")

import onnx_adapter

CASES = {case.name: case for case in onnx_adapter.cases()}
HALF = [name for name, case in CASES.items() if case.dtype != "float32"]


@pytest.mark.parametrize("path", PATHS)
@every("name", CASES)
def test_case(name: str, path: str) -> None:
    CASES[name].check(onnx_adapter.run(CASES[name], path))


def test_the_cases_are_all_there() -> None:
    # Were the list of cases to come out shorter, the tests above would pass in silence.
    assert len(CASES) == 93
    modes = {case.attributes.get("qk_matmul_output_mode", 0) for case in CASES.values() if len(case.outputs) in (2, 4)}
    assert modes == {0, 1, 2, 3}
    assert {case.dtype for case in CASES.values()} == {"float32", "float16", "bfloat16"}


@pytest.mark.parametrize("path", PATHS)
@every("name", HALF)
def test_half_precision_is_right_to_the_last_place(name: str, path: str) -> None:
    """The expected answers are one or two places off; ours are within one of the answer in float64."""
    case = CASES[name]
    wide = {key: x if x.dtype.kind in "bi" else x.astype(np.float64) for key, x in case.inputs.items()}
    exact = onnx_adapter.run(replace(case, inputs=wide), "plain")["Y"]
    got = onnx_adapter.run(case, path)["Y"].astype(np.float64)
    np.testing.assert_allclose(got, exact, onnx_adapter.ULPS[case.dtype] / 2, case.atol)
