"""The policy losses, KL forms and preference losses again, token by token in Python floats, without the library's
numerics.

Every function takes rows: `x[sequence][token]` for current log-probs, and a `case` with the other rows, and gives what
each token contributes (before averaging), or for losses of whole responses the loss itself.
"""

from __future__ import annotations

import math


def gaps(x, case):
    return [[a - b for a, b in zip(r, q, strict=True)] for r, q in zip(x, case.rows(case.proximal), strict=True)]


def per_token(x, case, function):
    """function(gap, advantage, logprob, proximal) of every token."""
    rows = zip(x, case.rows(case.proximal), case.rows(case.advantage), strict=True)
    return [[function(a - b, d, a, b) for a, b, d in zip(r, q, s, strict=True)] for r, q, s in rows]


def level(gap_rows, name):
    """Log-ratios of tokens, or of their responses at each token."""
    if name == "token":
        return gap_rows
    if name == "sequence":
        return [[math.fsum(row)] * len(row) for row in gap_rows]
    return [[math.fsum(row) / len(row)] * len(row) for row in gap_rows]


def hard(ratio, advantage, low, high, cap=None):
    bounded = min(max(ratio, 1 - low), 1 + high)
    value = min(ratio * advantage, bounded * advantage)
    return -(max(value, cap * advantage) if cap is not None and advantage < 0 else value)


def soft(ratio, advantage, positive, negative):
    tau = positive if advantage > 0 else negative
    return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage


def diverged(now, before, advantage, by, low, high):
    """Whether DPPO masks a token, from its two probabilities."""
    p, q = math.exp(now), math.exp(before)
    moved = abs(p - q)
    if by == "kl":
        moved = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    return moved > high if advantage > 0 and p > q else advantage <= 0 and p < q and moved > low


def gmpo(x, case, low, high):
    result = []
    for row, advantages in zip(gaps(x, case), case.rows(case.advantage), strict=True):
        clipped = []
        for gap, a in zip(row, advantages, strict=True):
            if a > 0:
                clipped.append(min(gap, high))
            elif a < 0:
                clipped.append(max(gap, -low))
            else:
                clipped.append(0.0)
        ratio = math.exp(math.fsum(clipped) / len(row)) if row else 1.0
        advantage = math.fsum(advantages) / len(row) if row else 0.0
        result.append([-advantage * ratio] * len(row))
    return result


def vespo_weights(x, case, positive=(2.0, 3.0), negative=(3.0, 2.0)):
    result = []
    for row, advantages in zip(gaps(x, case), case.rows(case.advantage), strict=True):
        w = math.exp(math.fsum(row))
        result.append([w**k * math.exp(d * (1 - w)) for k, d in (positive if a >= 0 else negative for a in advantages)])
    return result


def covariances(case, live):
    logprobs = [case.logprobs[t] for t in live]
    advantages = [case.advantage[t] for t in live]
    left, right = math.fsum(logprobs) / len(live), math.fsum(advantages) / len(live)
    return {t: (case.logprobs[t] - left) * (case.advantage[t] - right) for t in live}


def beyond_moment(case, live, bound):
    """Tokens to leave out, largest squared log-ratio first, until the mean of the rest is within the bound."""
    left = sorted(live, key=lambda t: (case.logprobs[t] - case.proximal[t]) ** 2)
    out = []
    while left and math.fsum((case.logprobs[t] - case.proximal[t]) ** 2 for t in left) / len(left) > bound:
        out.append(left.pop())
    return out


def sigmoid(v):
    return 1 / (1 + math.exp(-v)) if v >= 0 else math.exp(v) / (1 + math.exp(v))


def pacs(logprobs, s, beta=1.0, balanced=True):
    """`s` has lists proximal, group, reward; logprobs are sums of responses."""
    total, count = 0.0, 0
    score = [beta * (a - b) for a, b in zip(logprobs, s.proximal, strict=True)]
    for i, label in enumerate(s.reward):
        members = [j for j in range(len(score)) if s.group[j] == s.group[i]]
        others = [score[j] for j in members if j != i]
        if not others:
            continue
        psi = score[i] - math.fsum(others) / len(others)
        loss = -(label * math.log(sigmoid(psi)) + (1 - label) * math.log(sigmoid(-psi)))
        labels = [s.reward[j] for j in members]
        if balanced and set(labels) == {0.0, 1.0}:
            loss *= len(labels) / (2 * labels.count(label))
        total, count = total + loss, count + 1
    return total / max(1, count)


def copg(logprobs, s, beta):
    ratio = [a - b for a, b in zip(logprobs, s.reference, strict=True)]
    by_group = []
    for group in sorted(set(s.group)):
        members = [i for i, g in enumerate(s.group) if g == group]
        pairs = [(i, j) for i in members for j in members if i < j]
        if pairs:
            gaps_ = [(s.reward[i] - s.reward[j], ratio[i] - ratio[j]) for i, j in pairs]
            by_group.append(-math.fsum(r * d - beta / 2 * d * d for r, d in gaps_) / len(pairs))
    return math.fsum(by_group) / max(1, len(by_group))


def balance(logprobs, s, scale, floor):
    """Trajectory balance: the variance of log pi - log R within each group, with every response counting the same."""
    score = [a - math.log(floor + scale * r) for a, r in zip(logprobs, s.reward, strict=True)]
    total = 0.0
    for i in range(len(score)):
        members = [score[j] for j in range(len(score)) if s.group[j] == s.group[i]]
        total += (score[i] - math.fsum(members) / len(members)) ** 2
    return total / len(score)


def self_score(logprobs, s, beta, constant, balanced):
    right = [r >= 0.5 for r in s.reward]
    total = 0.0
    for value, reward, is_right in zip(logprobs, s.reward, right, strict=True):
        weight = len(right) / (2 * right.count(is_right)) if balanced and len(set(right)) == 2 else 1.0
        total += weight * (beta * (value - constant) - reward) ** 2
    return total / len(right)


def outcome(logprobs, s, beta):
    total = 0.0
    for value, reference, label in zip(logprobs, s.reference, s.reward, strict=True):
        p = sigmoid(beta * (value - reference))
        total -= label * math.log(p) + (1 - label) * math.log(1 - p)
    return total / len(s.reward)


def pairs_of(s, which):
    results = []
    for group in sorted(set(s.group)):
        members = [i for i, g in enumerate(s.group) if g == group]
        if which == "all":
            results += [(i, j) for i in members for j in members if s.reward[i] > s.reward[j]]
        else:
            best = max(members, key=lambda i: (s.reward[i], -i))
            worst = min(members, key=lambda i: (s.reward[i], i))
            if s.reward[best] > s.reward[worst]:
                results.append((best, worst))
    return results


def preference(logprobs, s, name, beta, which, flipped=0.0):
    ratio = [a - b for a, b in zip(logprobs, s.reference, strict=True)]
    results = pairs_of(s, which)
    total = 0.0
    for better, worse in results:
        gap = ratio[better] - ratio[worse]
        if name == "dpo":
            total -= (1 - flipped) * math.log(sigmoid(beta * gap)) + flipped * math.log(sigmoid(-beta * gap))
        else:
            total += (gap - 1 / (2 * beta)) ** 2
    return total / max(1, len(results))


def kto(logprobs, s, beta, zero, right=1.0, wrong=1.0):
    total = 0.0
    for value, reference, reward in zip(logprobs, s.reference, s.reward, strict=True):
        r = value - reference
        total += right * (1 - sigmoid(beta * (r - zero))) if reward >= 0.5 else wrong * (1 - sigmoid(beta * (zero - r)))
    return total / len(logprobs)
