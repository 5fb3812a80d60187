"""The formulas again, slowly and in float64, without a line of the library's numerics."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch


def group_advantages(rewards, groups, baseline, scale, epsilon):
    """Advantages by explicit loops over the members of each group; NaN rewards are undecided."""
    result = []
    for i, reward in enumerate(rewards):
        if not math.isfinite(reward):
            result.append(0.0)
            continue
        peers = [r for j, r in enumerate(rewards) if groups[j] == groups[i] and math.isfinite(r)]
        others = [r for j, r in enumerate(rewards) if groups[j] == groups[i] and math.isfinite(r) and j != i]
        mean = math.fsum(peers) / len(peers)
        if baseline == "mean":
            value = reward - mean
        elif baseline == "leave_one_out":
            value = reward - math.fsum(others) / len(others) if others else 0.0
        else:
            value = reward
        if scale == "std" and len(peers) > 1:
            value /= math.sqrt(math.fsum((r - mean) ** 2 for r in peers) / len(peers)) + epsilon
        result.append(0.0 if baseline != "none" and max(peers) == min(peers) else value)
    return result


def averaged(values, weights, by, constant=1.0):
    """The weighted average of values[sequence][token] as the papers write it, by nested loops."""
    live = [(v, w) for v, w in zip(values, weights, strict=True) if sum(w) > 0]
    if by == "tokens":
        total = sum(w for _, ws in live for w in ws)
        return sum(w * v for vs, ws in live for v, w in zip(vs, ws, strict=True)) / total
    per_sequence = []
    for vs, ws in live:
        length = sum(ws) if by == "sequences" else constant
        per_sequence.append(sum(w * v for v, w in zip(vs, ws, strict=True)) / length)
    return sum(per_sequence) / len(per_sequence)


def clipped(logprob, proximal, advantage, low, high):
    """PPO's clipped loss of one token."""
    ratio = math.exp(logprob - proximal)
    if ratio < 1 - low:
        bounded = 1 - low
    elif ratio > 1 + high:
        bounded = 1 + high
    else:
        bounded = ratio
    return -min(ratio * advantage, bounded * advantage)


def divergence(name, logprob, reference):
    """Schulman's estimators, written with r = reference / pi."""
    ratio = math.exp(reference - logprob)
    if name == "k1":
        return -math.log(ratio)
    if name == "k2":
        return math.log(ratio) ** 2 / 2
    return (ratio - 1) - math.log(ratio)


def double(policy):
    """A float64 copy of the policy's model."""
    return copy.deepcopy(policy.model).double()


def token_statistics(model, rollout, temperature=None):
    """(log-probs, entropies) of tokens 1 .. T-1 of one rollout alone, from all of the model's own logits."""
    logits = model(input_ids=torch.as_tensor(rollout.token_ids)[None]).logits[0, :-1]
    table = torch.log_softmax(logits.double() / (temperature or rollout.temperature), dim=-1)
    chosen = table[torch.arange(len(rollout) - 1), torch.as_tensor(rollout.token_ids[1:])]
    return chosen, -(table.exp() * table).sum(-1)


def torch_averaged(values, weights, by, constant):
    """`averaged` for tensors."""
    live = [(v, w) for v, w in zip(values, weights, strict=True) if float(w.sum()) > 0]
    if by == "tokens":
        return sum((v * w).sum() for v, w in live) / sum(float(w.sum()) for _, w in live)
    lengths = [float(w.sum()) if by == "sequences" else constant for _, w in live]
    return sum((v * w).sum() / n for (v, w), n in zip(live, lengths, strict=True)) / len(live)


def objective(
    model, batch, average, *, low=0.2, high=0.2, first=True, kl=None, entropy=0.0, reference=None, constant=1.0
):
    """The whole loss of a batch under a float64 model, rollout by rollout; `kl` is (estimator, coefficient).

    -> (total, values by name)
    """
    policy_terms, kl_terms, entropies, weights = [], [], [], []
    for i, rollout in enumerate(batch.rollouts):
        weight = torch.as_tensor(batch.token_columns["weight/policy"][i][1:]).double()
        logprobs, entropy_here = token_statistics(model, rollout)
        advantage = float(batch.columns["advantage"][i])
        behaviour = torch.as_tensor(rollout.behaviour_logprobs[1:]).double()
        proximal = logprobs.detach() if first else torch.where(weight > 0, behaviour, logprobs.detach())
        ratio = (logprobs - proximal).exp()
        policy_terms.append(-torch.minimum(ratio * advantage, ratio.clip(1 - low, 1 + high) * advantage))
        entropies.append(entropy_here)
        weights.append(weight)
        if kl is not None:
            with torch.no_grad():
                other, _ = token_statistics(reference, rollout)
            d = other - logprobs
            kl_terms.append({"k1": -d, "k2": d**2 / 2, "k3": d.exp() - 1 - d}[kl[0]])
    values = {"policy": torch_averaged(policy_terms, weights, average, constant)}
    total = values["policy"]
    if kl is not None:
        values["kl"] = torch_averaged(kl_terms, weights, average, constant)
        total = total + kl[1] * values["kl"]
    if entropy:
        values["entropy"] = -torch_averaged(entropies, weights, average, constant)
        total = total + entropy * values["entropy"]
    return total, values


def gradient_of(model, total):
    """The flat gradient of a scalar in the parameters that train."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(total, parameters, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, grads, strict=True)]
    )


def gap(left, right):
    """The difference of two flat gradients relative to the global norm of the second."""
    return float((left - right).norm() / right.norm())


def finite_differences(function, point, step=1e-6):
    """Central differences of a scalar function of a flat float64 array."""
    result = np.zeros(len(point))
    for i in range(len(point)):
        up, down = point.copy(), point.copy()
        up[i] += step
        down[i] -= step
        result[i] = (function(up) - function(down)) / (2 * step)
    return result
