"""Packed rows with shared prefixes against padded rows and a float64 model, one rollout at a time."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from number_oracles import double, gap, gradient_of, objective, token_statistics
from rlvr.config import ModelConfig, OptimConfig, ScratchConfig
from rlvr.core.needs import CURRENT, Need
from rlvr.errors import ConfigError
from rlvr.learner import Learner
from rlvr.losses import ClippedPolicyLoss, Objective, ObjectiveTerm
from rlvr.policy import Cost, check_packing, forward, load_policy, micro_batches, microbatch
from rlvr.policy.attention import Spans, attending
from rlvr.policy.attention.packed_rows import shared_prefixes
from rlvr.policy.attention.packing_trial import unpackable_layers
from rlvr.policy.statistics import DeferredColumns
from rlvr.records import Batch, Origin, Rollout, StopReason, Task
from rlvr.rollout.rows import check_cacheable

BOTH = [Need("logprobs", grad=True), Need("entropy", grad=True)]
WINDOWED = ("gemma2", "gemma3_text", "mistral", "phi3")
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", *WINDOWED, "phi", "gpt2")
PADDED = OptimConfig(packing=False)
WAYS = {
    "packed": {"packing": True, "share_prefix": False},
    "shared": {"share_prefix": True},
    "auto": {},
}


def tiny(architecture="qwen2", attention=None, **options):
    scratch = {"hidden_size": 32, "layers": 2, "intermediate_size": 64, "context": 96, "init_std": 0.2, **options}
    section = ModelConfig(
        scratch=ScratchConfig(architecture=architecture, **scratch), device="cpu", attention=attention
    )
    return load_policy(section)


@pytest.fixture(scope="module")
def small():
    return tiny()


def rollout(group, member, prompt, tail, origin=None, temperature=1.0):
    ids = np.concatenate([prompt, tail]).astype(np.int64)
    written = np.full(len(tail), Origin.POLICY) if origin is None else origin
    return Rollout(
        id=f"{group}/{member}",
        task=Task(str(group), "?"),
        group=str(group),
        member=member,
        token_ids=ids,
        origin=np.concatenate([np.full(len(prompt), Origin.PROMPT), written]).astype(np.int8),
        behaviour_logprobs=np.full(len(ids), np.nan, dtype=np.float32),
        policy_version=np.zeros(len(ids), dtype=np.int32),
        stop=StopReason.END,
        temperature=temperature,
    )


def ragged(seed, groups=None, longest=14):
    """Groups of 1 to 5 rollouts: prompts from one token on, completions from none on, some with a tool's tokens in
    them, some identical, some groups without a prompt in common."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for g in range(groups or int(rng.integers(1, 5))):
        prompt = rng.integers(3, 50, int(rng.integers(1, 9)))
        tails: list[np.ndarray] = []
        for m in range(int(rng.integers(1, 6))):
            tail = rng.integers(3, 50, int(rng.integers(0, longest)))
            if tails and rng.random() < 0.3:
                tail = tails[0].copy()
            tails.append(tail)
            origin = np.where(rng.random(len(tail)) < 0.3, Origin.TOOL, Origin.POLICY)
            head = rng.integers(3, 50, 4) if rng.random() < 0.05 else prompt
            rollouts.append(rollout(g, m, head, tail, origin, (1.0, 0.7)[g % 2]))
    rollouts.append(rollout("last", 0, rng.integers(3, 50, 2), rng.integers(3, 50, 3)))
    order = rng.permutation(len(rollouts))
    return Batch([rollouts[i] for i in order])


def measured(policy, batch, config, index=None):
    """(statistics of each rollout's trained tokens, gradient of a weighted sum of them, the micro-batches)."""
    index = np.arange(len(batch)) if index is None else index
    trained = [r.sampled for r in batch.rollouts]
    weights = [np.linspace(-1, 1, len(r)).astype(np.float32) + i for i, r in enumerate(batch.rollouts)]
    columns = {name: [np.zeros(len(r), dtype=np.float32) for r in batch.rollouts] for name in ("logprobs", "entropy")}
    total, made, later = torch.zeros(()), list(micro_batches(policy, batch, index, trained, config)), DeferredColumns()
    for rows in made:
        got = forward(policy, rows, BOTH)
        for name, values in columns.items():
            later.add(rows, got[name, CURRENT], values)
        of_each = torch.from_numpy(rows.at_trained(weights))
        total = total + (of_each * (got["logprobs", CURRENT] + 0.5 * got["entropy", CURRENT])).sum()
    later.write()
    return columns, gradient_of(policy.model, total).double(), made


def expected(policy, batch):
    """The same from a float64 model, rollout by rollout."""
    model = double(policy)
    total, columns = torch.zeros((), dtype=torch.float64), {"logprobs": [], "entropy": []}
    for i, r in enumerate(batch.rollouts):
        weight = torch.linspace(-1, 1, len(r)).double() + i
        logprobs, entropy = token_statistics(model, r)
        on = torch.as_tensor(r.sampled)
        total = total + (weight[1:] * (logprobs + 0.5 * entropy))[on[1:]].sum()
        for name, values in (("logprobs", logprobs), ("entropy", entropy)):
            columns[name].append(torch.where(on[1:], values.detach(), 0.0).numpy())
    return columns, gradient_of(model, total)


def assert_same(got, want, tolerance=1e-5):
    for name, values in want[0].items():
        for ours, theirs in zip(got[0][name], values, strict=True):
            np.testing.assert_allclose(ours[-len(theirs) :] if len(theirs) else ours[:0], theirs, rtol=1e-5, atol=2e-5)
    assert gap(got[1], want[1]) < tolerance


# N1 ------------------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(list(WAYS)),
    st.sampled_from(
        [{}, *({"micro_batch_size": n} for n in (1, 2, 5)), *({"micro_batch_tokens": n} for n in (1, 25, 60))]
    ),
)
def test_packed_rows_are_the_padded_ones(small, seed, way, cuts):
    batch = ragged(seed)
    got = measured(small, batch, OptimConfig(**WAYS[way], **cuts))
    assert_same(got, measured(small, batch, PADDED))
    assert_same(got, expected(small, batch))
    assert sorted(i for rows in got[2] for i in rows.index) == list(range(len(batch)))


@pytest.mark.parametrize("way", ["packed", "shared"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(architecture, way):
    policy = tiny(architecture)
    if architecture in WINDOWED:
        policy.causal_lm.config.sliding_window = 4
    batch = ragged(7, groups=4)
    want = expected(policy, batch)  # of the model as it came
    assert_same(measured(policy, batch, OptimConfig(**WAYS[way])), want)
    assert_same(measured(policy, batch, PADDED), want)


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss", "llama"])
def test_eager_attention_keeps_its_soft_cap_and_its_sinks(architecture):
    policy = tiny(architecture, attention="eager")
    config = policy.causal_lm.config
    config.sliding_window = 4
    batch = ragged(8, groups=3)
    loose = measured(policy, batch, PADDED)
    for module in policy.causal_lm.modules():  # so that a forgotten cap or sink would show
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = 0.5
        if hasattr(module, "sinks"):
            torch.nn.init.constant_(module.sinks, 3.0)
    want = measured(policy, batch, PADDED)  # gpt_oss does not compute in float64
    assert architecture == "llama" or gap(want[1], loose[1]) > 1e-2
    assert_same(measured(policy, batch, OptimConfig(share_prefix=True)), want)


@pytest.mark.parametrize("options", [{}, {"share_prefix": True, "micro_batch_tokens": 30}, {"packing": True}])
@pytest.mark.parametrize("adapter", [None, {"r": 4, "alpha": 8.0}])
def test_the_learners_gradient(make_policy, make_batch, recording, options, adapter):
    policy = make_policy(adapter=adapter)
    batch, model = make_batch(policy), double(policy)
    want = gradient_of(model, objective(model, batch, "sequences")[0])
    target = Objective((ObjectiveTerm("policy", ClippedPolicyLoss(0.2, 0.2, "sequences"), "policy"),))
    backend = recording(policy, moves=False)
    metrics = Learner(backend).update(batch, target, OptimConfig(optimizer="sgd", max_grad_norm=1e9, **options), 1.0)
    assert gap(backend.gradients[0], want) < 1e-5
    assert metrics["ratio/mean"] == 1.0


def test_gradient_checkpointing(make_policy):
    policy, batch = make_policy(), ragged(3)
    want = measured(policy, batch, PADDED)
    policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.model.train()
    assert_same(measured(policy, batch, OptimConfig(share_prefix=True)), want)


def test_a_shared_prompt_is_computed_once_and_its_last_token_predicts_every_first_one(small):
    prompt, tails = np.arange(5, 25), [np.asarray([30, 31]), np.asarray([32]), np.asarray([30, 33, 34])]
    batch = Batch([rollout("g", m, prompt, tail) for m, tail in enumerate(tails)])
    (rows,) = measured(small, batch, OptimConfig(share_prefix=True))[2]
    assert rows.input_ids.tolist() == [[*prompt, 30, 33, 34, 30, 31, 32]]
    assert rows.position_ids.tolist() == [[*range(20), 20, 21, 22, 20, 21, 20]]
    assert rows.index.tolist() == [2, 0, 1]
    assert rows.source.tolist() == [19, 20, 21, 19, 23, 19]
    assert rows.targets.tolist() == [30, 33, 34, 30, 31, 32]


def test_a_group_cut_in_two_computes_its_prompt_in_both(small):
    batch = Batch([rollout("g", m, np.arange(5, 15), np.asarray([20 + m, 3, 4])) for m in range(5)])
    made = measured(small, batch, OptimConfig(share_prefix=True, micro_batch_tokens=16))[2]
    assert [len(rows.index) for rows in made] == [2, 2, 1]
    assert [rows.input_ids.shape[1] for rows in made] == [16, 16, 13]


def test_company_in_a_row_is_not_seen(small):
    """Other rollouts of the row may be anything."""
    batch = ragged(11, groups=3)
    alone = measured(small, batch.select([0]), OptimConfig(packing=True))[0]
    got = measured(small, batch, OptimConfig(packing=True))[0]
    for name, values in alone.items():
        np.testing.assert_allclose(got[name][0], values[0], rtol=1e-5, atol=2e-5)


# Rows -----------------------------------------------------------------------------------------------------------------


def test_the_hook_changes_nothing_without_spans_and_is_not_saved(tmp_path):
    policy = tiny("mistral")
    ids, mask = torch.arange(5, 17).view(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[1, :3] = 0
    before = policy.model(input_ids=ids, attention_mask=mask).logits
    assert policy.packing.shares
    assert policy.causal_lm.config._attn_implementation == "rlvr_sdpa"
    assert torch.equal(policy.model(input_ids=ids, attention_mask=mask).logits, before)
    with attending(None):
        assert torch.equal(policy.model(input_ids=ids, attention_mask=mask).logits, before)
    policy.model.save_pretrained(tmp_path)
    assert "rlvr" not in (tmp_path / "config.json").read_text()


def test_common_prefixes():
    heads = {"a": [5, 6, 7, 8], "b": [5, 6], "c": [9]}
    ids = [("a", [1, 2]), ("b", [3]), ("a", [1, 3]), ("c", []), ("b", []), ("a", [1])]
    batch = Batch([rollout(g, m, np.asarray(heads[g]), np.asarray(t, dtype=int)) for m, (g, t) in enumerate(ids)])
    shared = shared_prefixes(batch, np.asarray([5, 1, 2, 3, 4, 0]))
    assert shared.cluster.tolist() == [0, 1, 0, 2, 1, 0]
    assert shared.prefix.tolist() == [5, 2, 5, 0, 2, 5]


# Choice --------------------------------------------------------------------------------------------------------------


def workload(groups, members, prompt, lengths):
    rng = np.random.default_rng(0)
    rollouts = []
    for g in range(groups):
        head = rng.integers(3, 50, prompt)
        rollouts += [rollout(g, m, head, rng.integers(3, 50, next(lengths))) for m in range(members)]
    return Batch(rollouts)


def endless(values):
    while True:
        yield from values


@pytest.mark.parametrize(
    ("batch", "packs", "most"),
    [
        (workload(8, 8, 4, endless([32])), False, 64 * 36),
        (workload(8, 8, 4, endless([3, 5, 9, 80])), True, 64 * 30),
        (workload(2, 16, 60, endless([8])), True, 2 * (60 + 16 * 8)),
    ],
    ids=["equal and short", "ragged", "long prompt"],
)
def test_auto_takes_what_costs_less(batch, packs, most):
    policy = tiny(hidden_size=64, intermediate_size=256)
    made = list(micro_batches(policy, batch, np.arange(len(batch)), [r.sampled for r in batch.rollouts], OptimConfig()))
    assert [rows.spans is not None for rows in made] == [packs]
    assert made[0].input_ids.numel() <= most


def test_the_estimate_is_linear_in_rollouts(small):
    estimate, lengths = Cost.of(small), np.asarray([10, 20, 30])
    np.testing.assert_allclose(estimate.alone(np.tile(lengths, 2)).sum(), 2 * estimate.alone(lengths).sum())
    apart = Spans(np.asarray([10, 100]), np.asarray([-1, -1]), torch.device("cpu"))
    assert estimate.padded(np.asarray([10, 100])) > estimate.packed(apart)


@pytest.mark.parametrize(("architecture", "why"), [("bloom", "separate rows"), ("qwen3_next", "linear_attention")])
def test_models_that_cannot_are_padded_and_say_so_once(architecture, why, caplog, monkeypatch):
    monkeypatch.setattr(microbatch, "_warned", set())
    policy = tiny(architecture)
    before = policy.causal_lm.config._attn_implementation
    batch = workload(3, 8, 20, endless([2, 30]))
    trained, everything = [r.sampled for r in batch.rollouts], np.arange(len(batch))
    with caplog.at_level(logging.WARNING):
        made = [rows for _ in range(2) for rows in micro_batches(policy, batch, everything, trained, OptimConfig())]
    assert all(rows.spans is None for rows in made)
    (output,) = [record.message for record in caplog.records if "rows are padded" in record.message]
    assert why in output
    assert policy.causal_lm.config._attn_implementation == before
    for key in ("packing", "share_prefix"):
        with pytest.raises(ConfigError, match=f"optim.{key} is true.*{why}"):
            check_packing(policy, OptimConfig(**{key: True}))


@pytest.mark.parametrize("architecture", ["zamba", "zamba2"])
def test_hybrids_with_a_state_are_known_by_their_configuration(architecture):
    """Such a model is too large to build here: nothing of it but its configuration is asked."""
    config = AutoConfig.for_model(architecture)
    assert unpackable_layers(config)
    with pytest.raises(ConfigError, match="decodes attention layers only"):
        check_cacheable(config)


def test_a_budget_smaller_than_a_rollout_is_said_once(small, caplog, monkeypatch):
    monkeypatch.setattr(microbatch, "_warned", set())
    batch = ragged(5, groups=3)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            made = measured(small, batch, OptimConfig(micro_batch_tokens=3))[2]
    assert all(len(rows.index) == 1 or rows.input_ids.numel() <= 3 for rows in made)
    assert len([r for r in caplog.records if "micro_batch_tokens is 3" in r.message]) == 1


def test_sharing_without_packing_is_refused():
    with pytest.raises(ValueError, match="share_prefix"):
        OptimConfig(packing=False, share_prefix=True)


@pytest.mark.parametrize("architecture", ["gemma2", "vaultgemma"])
def test_an_attention_soft_cap_is_applied_in_every_row(architecture):
    """transformers' sdpa leaves it out. The oracle is the model in float64 with eager attention, one rollout at a
    time."""
    policy = tiny(architecture, init_std=0.3)
    policy.causal_lm.config.get_text_config().attn_logit_softcapping = 5.0
    for layer in policy.causal_lm.model.layers:
        layer.self_attn.attn_logit_softcapping = 5.0  # so tight that a forgotten cap shows
    batch = ragged(3)
    model = double(policy)
    model.set_attn_implementation("eager")
    on = torch.cat([torch.as_tensor(r.sampled[1:]) for r in batch.rollouts])
    want = torch.cat([token_statistics(model, r)[0].detach() for r in batch.rollouts])[on]
    for options in ({"packing": False}, *WAYS.values()):
        columns, _, _ = measured(policy, batch, OptimConfig(**options))
        got = torch.cat([torch.as_tensor(values[1:]) for values in columns["logprobs"]])[on]
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match="attention soft-cap"):
        tiny(architecture, attention="sdpa")
