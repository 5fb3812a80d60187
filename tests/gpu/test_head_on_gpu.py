"""The Triton kernels of the fused head on the device itself, against plain formulas on all logits in float64."""

from __future__ import annotations

import pytest
import torch

from rlvr.policy.fused_head import fused_statistics
from rlvr.policy.head_devices import triton_kernels
from rlvr.policy.model import Head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_entropies_and_gradients(dtype, cap):
    """2,500 tokens by 40,000 entries: neither fills its last tile. The oracle starts from the products as rounded."""
    assert triton_kernels() is not None
    make = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(2500, 64, generator=make, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(40_000, 64, generator=make, device="cuda") / 4).to(dtype).requires_grad_()
    ids = torch.randint(40_000, (2500,), generator=make, device="cuda")
    temperature = torch.linspace(0.5, 2, 2500, device="cuda")
    slopes = torch.randn(2, 2500, generator=make, device="cuda")
    ours = fused_statistics(Head((hidden,), (weight,), cap=cap), temperature, {"logprobs": True, "entropy": True}, ids)
    got = torch.autograd.grad((ours["logprobs"] * slopes[0] + ours["entropy"] * slopes[1]).sum(), [hidden, weight])

    products = (hidden @ weight.T).detach().double().requires_grad_()
    logits = products if cap is None else cap * (products / cap).tanh()
    logprobs = (logits / temperature.double()[:, None]).log_softmax(1)
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    entropy = -(logprobs.exp() * logprobs).sum(1)
    (slope,) = torch.autograd.grad((chosen * slopes[0] + entropy * slopes[1]).sum(), products)
    torch.testing.assert_close(ours["logprobs"].double(), chosen, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(ours["entropy"].double(), entropy, rtol=1e-5, atol=1e-4)
    # Products in float32 may run in TF32; in bfloat16 the slope of each logit is rounded.
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-3
    for mine, right in zip(got, (slope @ weight.double(), slope.T @ hidden.double()), strict=True):
        assert float((mine.double() - right).norm()) <= tolerance * float(right.norm())
