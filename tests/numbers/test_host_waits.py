"""The host does not wait for the device within an optimizer step, whatever the loss: counted on CPU tensors.

A wait is what makes CUDA finish before Python goes on: a number or an array taken from a tensor, a tensor whose size depends on
data (`nonzero`, a mask as an index, `unique`), and a copy that is not made by `to_device`.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import rlvr.learner
import rlvr.policy.attention
import rlvr.policy.microbatch
import rlvr.recipes.loss_presets
from rlvr import registry
from rlvr.config_loading import load_config
from rlvr.distributed.plain import PlainBackend
from rlvr.learner import Learner
from rlvr.losses.step_metrics import StepMetrics
from rlvr.monitor.averages import Averages
from rlvr.policy import Snapshot
from rlvr.policy.transfer import to_device
from rlvr.stage_plan import stage_plans
from rlvr.stages.objective import build_objective

SIZED_BY_DATA = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "equal")
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
        masked = name in ("index", "index_put_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
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
    monkeypatch.setattr(rlvr.learner, "look_ahead", unseen(rlvr.learner.look_ahead))
    monkeypatch.setattr(Learner, "_gaps_without_gradient", unseen(Learner._gaps_without_gradient))
    for module in (rlvr.learner, rlvr.policy.attention, rlvr.policy.microbatch):
        monkeypatch.setattr(module, "to_device", copied)
    return each, whole, copies


@pytest.mark.parametrize("name", [*registry.names("preset"), *MORE])
def test_no_loss_makes_the_host_wait_within_a_micro_batch(name, policy, make_batch, forwards, counts):
    each, whole, copies = counts
    assert policy.head_is_enough and policy.packing.packs  # both are tried on a few tokens, once
    beside = []
    for size, packing in ((1, False), (3, False), (2, True)):
        optim = {"updates_per_batch": 2, "micro_batch_size": size, "packing": packing, "share_prefix": False}
        config = load_config({"run": {"steps": 1}, "algorithm": MORE.get(name, {"preset": name}), "optim": optim})
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
    assert len(set(beside)) == 1, f"waits beside one of each forward pass: {beside}"


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
    ("losses/ahead.py", "_of_responses"): WHOLE_STEP,
    ("losses/ahead.py", "_tokens"): WHOLE_STEP,
    ("losses/ahead.py", "_column"): WHOLE_STEP,
    ("losses/covariance.py", "choose"): WHOLE_STEP,
    ("losses/m2po.py", "choose"): WHOLE_STEP,
    ("losses/pacs.py", "shares"): WHOLE_STEP,
    ("losses/preference.py", "extremes"): WHOLE_STEP,
    ("losses/self_reward.py", "shares"): WHOLE_STEP,
    ("losses/sequences.py", "group_sum"): WHOLE_STEP,
    ("losses/sequences.py", "pairs"): WHOLE_STEP,
    ("losses/trajectory_balance.py", "shares"): WHOLE_STEP,
    ("losses/step_metrics.py", "_numbers"): "the one fetch of an optimizer step's metrics and losses",
    ("policy/microbatch.py", "write"): "the one fetch of values for token columns",
}
"""Functions that may take values out of tensors, by file, and why."""
FETCHES = {"item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "unique", "unique_consecutive"}
REDUCES = {"sum", "max", "min", "any", "all", "mean", "norm", "amax", "amin", "argmax", "argmin"}


def fetches(node: ast.AST, of_losses: bool) -> bool:
    """Whether a call takes a value out of a tensor: a method that does, or, in losses, a number made of a reduction."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        return node.func.attr in FETCHES and ast.unparse(node.func.value) != "np"
    name = isinstance(node.func, ast.Name) and node.func.id in ("float", "int", "bool")
    reduced = name and node.args and isinstance(node.args[0], ast.Call) and isinstance(node.args[0].func, ast.Attribute)
    return bool(of_losses and reduced and node.args[0].func.attr in REDUCES)


def test_nothing_takes_values_out_of_tensors_but_what_says_why():
    """In the files of losses, the policy, rewards and the learner that use torch; elsewhere there are arrays only."""
    source, found = Path(rlvr.__file__).parent, set()
    for path in [
        source / "learner.py",
        *(p for d in ("losses", "policy", "rewards") for p in (source / d).rglob("*.py")),
    ]:
        text = path.read_text()
        if "import torch" not in text:
            continue
        name = str(path.relative_to(source))
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                calls = (node for node in ast.walk(function) if fetches(node, name.startswith("losses/")))
                found |= {(name, function.name) for _ in calls}
    assert found == set(ALLOWED)
