"""Families of architectures in the engine's own decoding steps, against transformers' own logits of whole sequences."""

import copy

import numpy as np
import pytest
import torch
from engine_helpers import Casts, ask, compared, gap, some_requests

from architectures import ARCHITECTURES, policy_of
from rlvr.policy import Policy
from rlvr.rollout import HFEngine, Request, Sampling
from rlvr.rollout.decoder import RotaryForm
from rlvr.rollout.decoder_products import CalledFeedForward, GatedFeedForward
from rlvr.rollout.decoder_trial import proven

BY_MODULES = {"gpt_neox", "gpt2", "deepseek_v3", "opt"}
"""Those of the thirty that decode by their own modules."""
SERVED = [kind for kind in ARCHITECTURES if kind not in BY_MODULES]
MIXTURES = {"qwen3_moe", "mixtral", "gpt_oss"}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MORE = {
    "gemma2, windows in some layers, low caps": (
        "gemma2",
        {**MIXED, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0},
    ),
    "gemma3_text, angles by layer": ("gemma3_text", MIXED),
    "olmo3, windows in some layers": ("olmo3", MIXED),
    "gpt_oss, windows in some layers": ("gpt_oss", MIXED),
    "cohere2, a layer without rotation": ("cohere2", MIXED),
    "exaone4, a layer without rotation": ("exaone4", MIXED),
    "smollm3, layers without rotation": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "cohere, norms of heads": ("cohere", {"use_qk_norm": True}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True}),
    "qwen3_moe, a dense layer": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "phi, half of the channels rotated": ("phi", {"partial_rotary_factor": 0.5}),
}


def of(name):
    """A tiny policy of one of the thirty architectures, or of one of `MORE`."""
    kind, more = MORE.get(name, (name, {}))
    return policy_of(kind, {**ARCHITECTURES[kind], **more})


@pytest.fixture(scope="module")
def policies():
    """Policies by name, built once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = of(name)
        return made[name]

    return get


@pytest.mark.parametrize("name", [*SERVED, *MORE])
def test_logits_are_those_of_whole_sequences_in_float64(policies, name):
    """Prompts of 1, 4 and 9 tokens and twenty steps, over windows of 8."""
    policy = policies(name)
    exact = copy.deepcopy(policy.model).double()
    exact.set_experts_implementation("eager")  # torch's grouped products have no float64
    decoder, worst = compared(policy, model=exact)
    assert decoder.steps is not None
    assert worst < 1e-5


@pytest.mark.parametrize("name", sorted(BY_MODULES))
def test_the_others_decode_by_their_modules_and_are_right_too(policies, name):
    decoder, worst = compared(policies(name))
    assert decoder.steps is None
    assert worst < 1e-5


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "mixtral", "olmo2", "cohere2", "granite"])
def test_rows_that_come_and_go_have_the_trainers_log_probs(policies, name):
    policy = policies(name)
    requests = some_requests(policy, 24, seed=1, distinct=11, temperature=0.9)
    assert gap(policy, requests, ask(HFEngine(policy), requests, late=9)) < 1e-4


# In bfloat16 a mixture may send a token to another expert than in float32: then its log-probs differ by any amount, and
# only most of them are near.
@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3_text", "olmo2", "cohere2", "granite", "glm4", "phi", *sorted(MIXTURES)]
)
def test_bfloat16_is_near_and_no_step_casts_a_matrix(policies, name):
    exact = policies(name)
    policy = Policy(exact.model, exact.tokenizer, torch.bfloat16)
    engine = HFEngine(policy)
    requests = some_requests(policy, 16, seed=3)
    gaps = [gap(exact, [r], [c]) for r, c in zip(requests, ask(engine, requests), strict=True)]
    assert engine._decoder.steps is not None
    assert 1e-4 < np.median(gaps) < 0.2
    assert max(gaps) < 0.5 or name in MIXTURES
    least = min(p.numel() for p in exact.model.parameters() if p.ndim > 1)
    assert cast_by(engine, 12, least) == cast_by(engine, 2, least)


def cast_by(engine, tokens, least):
    """Tensors of at least `least` numbers that are cast while a row samples `tokens` tokens."""
    request = Request((3, 4), Sampling(tokens, ignore_eos=True), 0)
    with Casts() as casts:
        ask(engine, [request])
    return sum(size >= least for size in casts.sizes)


def test_the_parts_that_are_found_are_those_of_the_family(policies):
    """Each part must be there, or a test above would compare something easier than it says."""
    unlike = {"gpt_oss", "granite", "olmo2", "hunyuan_v1_dense", "cohere", "mixtral", "glm4"}
    first = {name: proven(policies(name)).blocks for name in (*unlike, *MORE)}
    assert first["gemma2, windows in some layers, low caps"][0].scoring.softcap == 1.5
    assert first["gpt_oss"][0]._parts.sinks is not None
    assert first["granite"][0]._parts.multiplier == 0.7
    assert first["olmo2"][0]._parts.norms_of_all_heads and first["olmo2"][0]._parts.norms.before_attention is None
    assert first["hunyuan_v1_dense"][0]._parts.norms_after_rotation
    assert first["cohere"][0]._parts.norms.parallel and first["stablelm, parallel"][0]._parts.norms.parallel
    assert isinstance(first["mixtral"][0].feed_forward, CalledFeedForward)
    mixed = first["qwen3_moe, a dense layer"]
    assert isinstance(mixed[0].feed_forward, CalledFeedForward) and isinstance(mixed[1].feed_forward, GatedFeedForward)
    for name in ("cohere2", "exaone4"):
        blocks = first[f"{name}, a layer without rotation"]
        assert [block.rotation.form is RotaryForm.NONE for block in blocks] == [False, True, False]
        assert [block.window for block in blocks] == [8, None, 8]
    forms = {blocks[0].rotation.form for blocks in first.values()}
    assert forms == set(RotaryForm) - {RotaryForm.NONE}
    angles = {block.rotation for block in first["gemma3_text, angles by layer"]}
    assert {rotation.layer_type for rotation in angles} == {"sliding_attention", "full_attention"}
