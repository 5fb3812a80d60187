"""The Triton kernels of the fused head: computed by Triton's interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("interpreted_head_cases.py")

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@needs_triton
def test_the_kernels_equal_plain_formulas_in_float64():
    """Runs the cases in a process that has TRITON_INTERPRET set before triton is imported."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-W", "ignore", str(CASES)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=CASES.parents[2])
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout and "skipped" not in ran.stdout


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("inner", [None, 0.033])
def test_the_kernels_compile_for_nvidia_gpus(capability, inner):
    """Triton and its assembler make machine code, with every optional sum and with none; nothing is run."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from rlvr.policy import head_kernels

    def compiled(kernel, pointers, constants):
        types = dict.fromkeys(pointers, "*fp32") | {"first": "i32", "columns": "i32", "products": "*bf16"}
        types |= {name: kind for name, kind in (("gradients", "*bf16"), ("ids", "*i64")) if name in pointers}
        names = kernel.arg_names
        signature = {name: types.get(name, "constexpr") for name in names}
        # What has no type is a constant: one that is given, or None for a sum that was not asked for.
        fixed = {(i,): constants.get(name) for i, name in enumerate(names) if name not in types}
        source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
        return compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": head_kernels.WARPS})

    limits = {"INNER": inner, "LOWEST": -1e30}
    sums = {**limits, "LEAST": torch.finfo(torch.float32).min, "BLOCK": head_kernels.SUM_BLOCK}
    slopes = {**limits, "BLOCK": head_kernels.GRADIENT_BLOCK}
    for kernel, needed, optional, constants in (
        (head_kernels._sums, ("factor", "maximum", "mass"), ("ids", "chosen", "entropy", "squares", "total"), sums),
        (
            head_kernels._gradient,
            ("gradients", "factor", "anchor", "log_mass", "a"),
            ("ids", "hot", "b", "c", "d"),
            slopes,
        ),
    ):
        for pointers in (needed, needed + optional):
            assert len(compiled(kernel, pointers, constants).asm["cubin"]) > 0
