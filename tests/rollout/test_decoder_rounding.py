"""Norms and attention of a decoding step in bfloat16, each alone, against float64."""

import types

import pytest
import torch
from transformers.models.gemma2.configuration_gemma2 import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from rlvr.policy.attention.calls import ScoreRule
from rlvr.rollout import decoder, decoder_products
from rlvr.rollout.decoder_parts import NormPart
from rlvr.rollout.decoder_products import Norm

TOKENS, HIDDEN = 64, 512
ROWS, SHARED, GROUPS, SIZE, SLOTS = 3, 2, 2, 64, 40


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32])
def test_no_channel_of_gemmas_norm_is_off_for_every_token(kept):
    """1 + w, rounded to bfloat16, is wrong by the same share in all tokens; the module's own sums are in float32."""
    module = Gemma2RMSNorm(HIDDEN, eps=Gemma2Config().rms_norm_eps)
    module.weight.data = (0.3 * normal(HIDDEN, seed=0)).to(kept)
    x = normal(TOKENS, HIDDEN, seed=1).bfloat16()
    norm = Norm(NormPart(module, module.eps, 1.0), torch.bfloat16)
    norm.refresh(torch.bfloat16)
    wide = x.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + module.eps).rsqrt() * (1 + module.weight.detach().double())

    def error(normed):
        """The mean over channels of a channel's mean error over the tokens, as a share of the channel."""
        return (((normed.double() - exact) / exact.abs()).mul(exact.sign()).mean(0)).abs().mean()

    with torch.no_grad():
        ours, theirs = norm(x), module(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert error(ours) < 1.5 * error(theirs)


@pytest.mark.parametrize("on_a_gpu", [False, True])
@pytest.mark.parametrize("way", ["soft-cap", "sinks"])
def test_large_scores_are_not_rounded_to_bfloat16(way, on_a_gpu, monkeypatch):
    """Of scores above 32 bfloat16 keeps quarters: probabilities off by a tenth, where their own rounding is 0.4 %."""
    if on_a_gpu:  # whose products into float32 a CPU does not have
        monkeypatch.setattr(decoder_products, "sums_in_float32", lambda device, dtype: True)
        monkeypatch.setattr(torch, "bmm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    q = normal(ROWS, SHARED, GROUPS, SIZE, seed=0).bfloat16()
    # All keys near 40 of the score scale along each head's first query, so that large scores differ by little.
    along = q[:, :, :1].float() / q[:, :, :1].float().square().sum(-1, keepdim=True)
    scale = SIZE**-0.5
    keys = (40 / scale * along + 0.1 * normal(ROWS, SHARED, SLOTS, SIZE, seed=1)).bfloat16()
    # The values are those of one slot each: attention gives the probabilities.
    values = torch.eye(SLOTS, SIZE).expand(ROWS, SHARED, -1, -1).bfloat16()
    cap = 200.0 if way == "soft-cap" else None
    sinks = torch.tensor([39.3, 0.7, 40.6, 0.3]) if way == "sinks" else None
    block = types.SimpleNamespace(scoring=ScoreRule(scale, cap), sinks=sinks, shared=SHARED)

    scored = (q.double() * scale) @ keys.double().transpose(-1, -2)
    assert scored[:, :, 0].min() > 32
    if cap is not None:
        scored = cap * (scored / cap).tanh()
    if sinks is not None:
        scored = torch.cat([scored, sinks.double().view(1, SHARED, GROUPS, 1).expand(ROWS, -1, -1, 1)], -1)
    exact = scored.softmax(-1)[..., :SLOTS]
    ours = decoder._attended_by_parts(q, keys, values, None, block)[..., :SLOTS].double()
    shown = exact > 1e-3
    assert shown[:, :, 0].float().mean() > 0.9
    # In bfloat16 itself a probability is off by at most 2^-9; log-probs of it by as much.
    assert (ours[shown].log() - exact[shown].log()).abs().max() < 3 * 2**-9
