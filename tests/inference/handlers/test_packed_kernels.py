"""The kernels of the packed encoder give the states of torch in Triton's interpreter, and compile for devices."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.inference.handlers.test_packed import CONFIGS

pytestmark = pytest.mark.thorough

pytest.importorskip("triton", reason="triton has no package for this system")


def test_every_family_and_what_happens_with_a_fault() -> None:
    script = [sys.executable, "-m", "tests.inference.handlers.interpreted_kernels"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])

    assert found["errors"].keys() == CONFIGS.keys()
    for kind, (of_states, of_means, spread) in found["errors"].items():
        assert of_states < 1e-5, kind
        assert of_means < 1e-5, kind
        assert spread > 0.1, kind  # not all alike
    assert found["chosen"] == {
        "none": "FusedEncoder kernel_rows",
        "other vectors": "Encoder attention_padded_rows",
        "not numbers": "Encoder attention_padded_rows",
        "no compiler": "Encoder attention_padded_rows",
    }
    assert done.stderr.count("runs without our kernels") == 3


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_attention_compiles_for_devices(dtype: str, capability: int) -> None:
    module: Any = importlib.import_module("luminosity.inference.handlers.text.packed.kernels")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    constants = {"heads": 12, "size": 32, "has_window": True, "rows_block": 32, "keys_block": 32, "padded": 32}
    numbers = ("tokens", "window", "reach", "query_stride", "key_stride", "value_stride")
    signature = {
        **dict.fromkeys(("queries", "keys", "values", "out"), f"*{dtype}"),
        "starts": "*i32", "owners": "*i64", "biases": "*fp32", "scale": "fp32",
        **dict.fromkeys(numbers, "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }  # fmt: skip
    ordered = {name: signature[name] for name in module._attend.arg_names}
    compiler: Any = importlib.import_module("triton.compiler")
    source = compiler.ASTSource(fn=module._attend, signature=ordered, constexprs=constants)
    assert ".entry _attend" in compiler.compile(source, target=target).asm["ptx"]
