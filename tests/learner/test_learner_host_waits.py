"""The host does not wait for the device within an optimizer step, whatever the loss: counted on CPU tensors.

A wait is what makes CUDA finish before Python goes on: a number or an array taken from a tensor, a tensor whose size
depends on data (`nonzero`, a mask as an index, `unique`), and a copy that is not made by `to_device`.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tensor_syntax import annotated_attributes, takes
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

import rlvr.learner.inputs
import rlvr.learner.learner
import rlvr.policy.attention.calls
import rlvr.policy.microbatch
import rlvr.recipes.loss_presets
from rlvr import registry
from rlvr.config import ModelConfig, ScratchConfig
from rlvr.config.config_loading import load_config
from rlvr.config.stage_plan import stage_plans
from rlvr.core.device_memory import to_device
from rlvr.distributed.plain import PlainBackend
from rlvr.learner import Learner
from rlvr.losses.objective import Averages, StepMetrics
from rlvr.policy import Snapshot
from rlvr.policy import make_policy as policy_of
from rlvr.policy.attention import Spans
from rlvr.policy.grouped_experts import NAME
from rlvr.policy.loading import set_checkpointing
from rlvr.policy.scratch import build_tokenizer
from rlvr.stages.grpo.build_objective import build_objective

SIZED_BY_DATA = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal")
SIZED_BY_DATA += ("unique", "_unique2", "unique_consecutive")
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
"""Operations with indices, whose number is not known where they are masks."""
TAKEN = ("numpy", "tolist", "cpu", "cuda", "__array__")
"""Methods of a tensor whose result is in host memory; a single number shows as `_local_scalar_dense`."""
MADE = ("tensor", "as_tensor", "from_numpy")
"""Makers of tensors from host memory, in whose place `to_device` stands."""


class Dispatched(TorchDispatchMode):
    """Counts the operations that have to look at data."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masked = name in INDEXED and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        repeated = name == "repeat_interleave" and not (kwargs or {}).get("output_size")
        if name in SIZED_BY_DATA or masked or repeated:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Counts the calls that copy between devices; on a CPU they reach no operation."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        ours = "/rlvr/" in sys._getframe(1).f_code.co_filename
        moved = name == "to" and any(isinstance(a, (torch.device, str)) for a in [*args[1:], *kwargs.values()])
        if name in TAKEN or (ours and (moved or name in MADE)):
            self.counts[name] += 1
        return function(*args, **kwargs)


MORE = {
    "kl and entropy": {"kl": {"coef": 0.01}, "entropy": 0.01, "correction": "truncate"},
    "mask": {"correction": {"name": "mask", "level": "sequence"}},
    "reject": {"correction": "reject"},
    "mask_negatives": {"correction": "mask_negatives"},
    "selector": {"token_select": ["top_entropy"]},
    "groups": {"loss": {"name": "clip", "average": "groups"}},
    "some tokens only": {"auxiliary": [{"name": "likelihood", "on": "best", "coef": 0.1}]},
    "pairs": {"auxiliary": [{"name": "dpo", "coef": 0.1}]},
}
"""What presets leave out, among it a component that trains a part of the tokens."""


@pytest.fixture
def counts(monkeypatch):
    """The waits of each micro-batch with a gradient, those of whole updates, and the copies to the device."""
    whole, each, copies = Counter(), [], []
    update, backward = Learner.update, Learner._backward

    def unseen(function):
        """The function, which computes in host memory or is the one that copies, without what it would count."""

        def wrapped(*arguments):
            before = whole.copy()
            result = function(*arguments)
            whole.clear()
            whole.update(before)
            return result

        return wrapped

    def in_update(self, *arguments):
        with Dispatched(whole), Called(whole):
            return update(self, *arguments)

    def in_backward(self, *arguments):
        before = whole.copy()
        backward(self, *arguments)
        each.append(whole - before)

    def copied(*arguments):
        copies.append(arguments)
        return unseen(to_device)(*arguments)

    monkeypatch.setattr(Learner, "update", in_update)
    monkeypatch.setattr(Learner, "_backward", in_backward)
    monkeypatch.setattr(rlvr.learner.learner, "prepass_statistics", unseen(rlvr.learner.learner.prepass_statistics))
    monkeypatch.setattr(Learner, "_log_ratios_without_gradient", unseen(Learner._log_ratios_without_gradient))
    for module in (rlvr.learner.inputs, rlvr.policy.attention.calls, rlvr.policy.microbatch):
        monkeypatch.setattr(module, "to_device", copied)
    return each, whole, copies


@pytest.mark.parametrize("name", [*registry.names("preset"), *MORE])
def test_no_loss_makes_the_host_wait_within_a_micro_batch(name, policy, make_batch, forwards, counts):
    beside = waits_of(policy, MORE.get(name, {"preset": name}), CUTS[:3], make_batch, forwards, counts)
    assert len(set(beside)) == 1, f"waits beside one of each forward pass: {beside}"


def mixture_of_experts(checkpointing, experts="grouped_mm"):
    """A policy of a tiny Qwen3-MoE; `experts`: how transformers computes them (its own choice where torch can is
    grouped_mm)."""
    tokenizer = build_tokenizer(ScratchConfig())
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 96}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    described = AutoConfig.for_model(
        "qwen3_moe", **sizes, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(described, experts_implementation=experts)
    return policy_of(model, tokenizer, ModelConfig(device="cpu", gradient_checkpointing=checkpointing))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("experts", [False, True])
def test_no_layout_and_no_model_makes_the_host_wait(
    checkpointing, experts, make_policy, make_batch, forwards, counts, monkeypatch
):
    """Padded, packed and shared rows, layers that are computed again in the backward pass, and the routing of
    experts."""
    policy = mixture_of_experts(checkpointing) if experts else make_policy()
    set_checkpointing(policy.model, checkpointing)
    recomputed = []
    for module in policy.model.modules():
        if checkpointing and hasattr(module, "_gradient_checkpointing_func"):
            plain = module._gradient_checkpointing_func
            module._gradient_checkpointing_func = lambda *a, plain=plain, **k: recomputed.append(1) or plain(*a, **k)
    shared = []
    lay_out = Spans.segments

    def watched(spans, window):
        shared.append(spans.context_length.any())
        return lay_out(spans, window)

    monkeypatch.setattr(Spans, "segments", watched)
    beside = waits_of(policy, {"preset": "grpo"}, CUTS, make_batch, forwards, counts)
    assert len(set(beside)) == 1, f"waits beside one of each forward pass: {beside}"
    assert any(shared) and bool(recomputed) == checkpointing


def test_waits_of_experts_that_are_computed_one_by_one_are_counted(make_batch, forwards, counts):
    """transformers' loop over experts looks for the tokens of each: its waits, which the count does not miss. On a GPU
    transformers takes grouped_mm by itself."""
    with pytest.raises(AssertionError, match="nonzero"):
        waits_of(mixture_of_experts(False, "eager"), {"preset": "grpo"}, CUTS[:1], make_batch, forwards, counts)
    assert mixture_of_experts(False, None).causal_lm.config._experts_implementation == NAME


CUTS = ((1, False, False), (3, False, False), (2, True, False), (4, True, True))
"""Rollouts of a micro-batch, `packing` and `share_prefix`."""


def waits_of(policy, algorithm, cuts, make_batch, forwards, counts):
    """The waits of an update beside one of each forward pass, for each way to cut it. AssertionError where a
    micro-batch has more."""
    each, whole, copies = counts
    assert policy.head_is_enough and policy.packing.packs  # both are tried on a few tokens, once
    beside = []
    for size, packing, share in cuts:
        optim = {"updates_per_batch": 2, "micro_batch_size": size, "packing": packing, "share_prefix": share}
        config = load_config({"run": {"steps": 1}, "algorithm": algorithm, "optim": optim})
        objective = build_objective(stage_plans(config)[0], False).at(0, 1)
        batch = make_batch(policy)
        for component in objective.components:
            if component.weights != "policy":
                batch.token_columns[f"weight/{component.weights}"] = component.loss.weights(batch)
        for counted in (each, whole, copies, forwards):
            counted.clear()
        metrics = Learner(PlainBackend(policy), Snapshot(policy)).update(batch, objective, config.optim, 1e-3)
        assert metrics["update/steps"] == 2
        assert len(each) >= 3
        # transformers looks for packed sequences in the positions of each forward pass (find_packed_sequence_indices)
        assert all(of_one <= Counter(_local_scalar_dense=1) for of_one in each), each
        assert len(copies) <= (2 + 4 * packing) * len(forwards)  # packed: of each block of attention, too
        beside.append(whole.total() - len(forwards))
    return beside


def test_metrics_fetched_together_are_those_fetched_one_by_one():
    """Sums of float32, float64 and counts; a maximum; a count that float32 does not hold; NaN and infinity."""
    generator = torch.Generator().manual_seed(0)
    together, one_by_one = StepMetrics(), Averages()
    losses = {"policy": 0.0, "kl": 0.0, "never": 0.0}
    for size in (3, 17, 1):
        values, weight = torch.rand(2, size, generator=generator)
        together.add_values({"ratio/mean": values, "ratio/max": values.double()}, weight)
        one_by_one.add("ratio/mean", float((weight * values).sum()), float(weight.sum()))
        one_by_one.add("ratio/max", float(values.double().max()))
        together.add("tokens/kept", torch.tensor((1 << 24) + size), 3.0)
        one_by_one.add("tokens/kept", (1 << 24) + size, 3.0)
        for name in ("policy", "kl"):
            share = values.sum() * (1 if name == "kl" else -1)
            together.add_loss(name, share.requires_grad_())
            losses[name] += float(share.detach())
        together.add_total(values.sum())
    fetched = together.fetch(list(losses))
    assert fetched.averages.pairs() == one_by_one.pairs()
    assert fetched.losses == losses
    assert fetched.finite
    for bad in (float("nan"), float("inf")):
        spoilt = StepMetrics()
        spoilt.add_total(torch.tensor(1.0))
        spoilt.add_total(torch.tensor(bad))
        assert not spoilt.fetch([]).finite
    assert StepMetrics().fetch(["policy"]).losses == {"policy": 0.0}


def test_arrays_go_to_the_device_in_one_copy(monkeypatch):
    """Of any type, shape and length, also none; from pinned memory, without waiting, where the device is a GPU."""
    rng = np.random.default_rng(0)
    arrays = [
        rng.integers(0, 9, (3, 5)),
        rng.normal(size=7).astype(np.float32),
        np.empty(0, dtype=np.int64),
        rng.normal(size=3),
        np.asarray([True, False, True]),
        rng.integers(0, 9, (4, 6)).T[1:3],
    ]
    for array, tensor in zip(arrays, to_device(arrays, torch.device("cpu")), strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
    calls = []
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: calls.append("pinned") or tensor)

    def recorded(tensor, device, non_blocking=False):
        calls.append((str(device), non_blocking))
        return to(tensor, "cpu")

    monkeypatch.setattr(torch.Tensor, "to", recorded)
    to_device(arrays, torch.device("cuda", 1))
    assert calls == ["pinned", ("cuda:1", True)]


WHOLE_STEP = "it is shown the whole optimizer step, in host memory"
ALLOWED = {
    ("recipes/raft/reward_model.py", "load_scorer"): "once, when the scorer is loaded",
    ("recipes/raft/reward_model.py", "score"): "the scores of a batch are numbers on the host",
    ("losses/prepass.py", "_of_responses"): WHOLE_STEP,
    ("losses/prepass.py", "_tokens"): WHOLE_STEP,
    ("losses/prepass.py", "_column"): WHOLE_STEP,
    ("losses/covariance.py", "choose"): WHOLE_STEP,
    ("losses/ratio_losses.py", "choose"): WHOLE_STEP,
    ("losses/preference.py", "extremes"): WHOLE_STEP,
    ("recipes/implicit_prm/outcome_classifier.py", "sequence_losses"): WHOLE_STEP,
    ("losses/sequences.py", "group_sum"): WHOLE_STEP,
    ("losses/sequences.py", "pairs"): WHOLE_STEP,
    ("losses/objective.py", "_denominator"): "the batch's weights are arrays",
    ("losses/objective.py", "trains"): "the batch's weights are arrays",
    ("losses/objective.py", "_numbers"): "the one fetch of an optimizer step's metrics and losses",
    ("recipes/for_/trajectory_balance.py", "sequence_losses"): WHOLE_STEP,
    ("recipes/laser/last_token_loss.py", "sequence_losses"): WHOLE_STEP,
    ("recipes/pacs/pacs.py", "sequence_losses"): WHOLE_STEP,
    ("policy/attention/packing_trial.py", "_near"): "once, when the model is loaded",
    ("policy/statistics.py", "write"): "the one fetch of values for token columns",
    ("policy/frozen_model.py", "class_logits"): "scores of a verifier are numbers on the host",
    ("policy/frozen_model.py", "embeddings"): "scores of a verifier are numbers on the host",
    ("policy/frozen_model.py", "log_probs_at"): "scores of a verifier are numbers on the host",
    ("policy/frozen_model.py", "token_logits"): "scores of a verifier are numbers on the host",
    ("policy/frozen_model.py", "token_log_probs"): "scores of a verifier are numbers on the host",
}
"""Functions that may take values out of tensors, by file, and why."""
FETCHES = {"item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "unique", "unique_consecutive"}
REDUCES = {"sum", "max", "min", "any", "all", "mean", "norm", "amax", "amin", "argmax", "argmin"}


def fetches(node: ast.AST, of_losses: bool) -> bool:
    """True for a call that takes a value out of a tensor: a method that does, or, in losses, a number made of a
    reduction."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        return node.func.attr in FETCHES and ast.unparse(node.func.value) != "np"
    name = isinstance(node.func, ast.Name) and node.func.id in ("float", "int", "bool")
    reduced = name and node.args and isinstance(node.args[0], ast.Call) and isinstance(node.args[0].func, ast.Attribute)
    return bool(of_losses and reduced and node.args[0].func.attr in REDUCES)


def test_nothing_takes_values_out_of_tensors_but_what_says_why():
    """In the files of losses, the policy, rewards, the learner and single papers that use torch; elsewhere there are
    arrays only."""
    source, results = Path(rlvr.__file__).parent, set()
    attributes = annotated_attributes(ast.parse(path.read_text()) for path in source.rglob("*.py"))
    for path in [
        *(source / "learner").rglob("*.py"),
        *(p for d in ("losses", "policy", "rewards") for p in (source / d).rglob("*.py")),
        *(source / "recipes").glob("*/*.py"),
    ]:
        text = path.read_text()
        if "import torch" not in text:
            continue
        name = str(path.relative_to(source))
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                calls = (node for node in ast.walk(function) if fetches(node, name.startswith(("losses/", "recipes/"))))
                results |= {(name, function.name) for _ in [*calls, *takes(function, attributes)]}
    assert results == set(ALLOWED)


TAKING = """
def f(x: torch.Tensor, y: torch.Tensor | None, array: np.ndarray, batch: TokenBatch, n: int):
    mask = (x > 0) & ~torch.isfinite(x)
    total = (x * n).sum()
    chosen = batch.logprobs
    {line}
"""


@pytest.mark.parametrize(
    ("line", "taken"),
    [
        ("z = x[mask]", "x[mask]"),
        ("z = x[:, x > 1]", "x[:, x > 1]"),
        ("x[mask] = 0", "x[mask]"),
        ("z = chosen[chosen.isnan()]", "chosen[chosen.isnan()]"),
        ("z = float(total)", "float(total)"),
        ("z = int(n + x.sum())", "int(n + x.sum())"),
        ("z = bool(batch.logprobs.any())", "bool(batch.logprobs.any())"),
        ("if n and not total > 3: pass", "total > 3"),
        ("z = 1 if mask.any() else 2", "mask.any()"),
        ("assert x.max() < 1", "x.max() < 1"),
        *[(line, None) for line in ("z = array[array > 0]", "z = float(array.sum())", "z = x[n]", "z = x[array]")],
        *[
            (line, None)
            for line in ("z = float(n)", "z = int(x.shape[0])", "z = y is None or n", "z = bool(x.requires_grad)")
        ],
        *[
            (line, None)
            for line in ("if y is not None and len(x): pass", "z = float(batch.moment)", "z = x.where(mask, y)")
        ],
        *[
            (line, None)
            for line in ("for x in array: z = float(x)", "x, z = 1, 2; int(x)", "values, places = x.max(1)")
        ],
    ],
)
def test_the_text_shows_values_that_are_taken_out_of_tensors(line, taken):
    (function,) = ast.parse(TAKING.format(line=line)).body
    assert list(takes(function, {"logprobs"})) == ([] if taken is None else [taken])


def test_an_attribute_is_a_tensor_where_every_class_says_so():
    text = "class A:\n a: torch.Tensor\n b: torch.Tensor | None\n c: torch.Tensor\nclass B:\n c: int\n d: str"
    assert annotated_attributes([ast.parse(text)]) == {"a", "b"}
