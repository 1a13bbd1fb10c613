"""The ONNX operator Attention: all cases that the `onnx` package tests, on every path."""

import pytest
from cases import every
from helpers import PATHS

# Version 1.23 corrected the cases: before it a causal mask did not count the keys of a cache kept outside, and a query
# that may see nothing was to give NaN.
pytest.importorskip("onnx", minversion="1.23", reason="onnx>=1.23 is absent, so its attention cases are not run")

import onnx_adapter

CASES = {case.name: case for case in onnx_adapter.cases()}


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
