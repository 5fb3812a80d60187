"""The layout that the cost model chooses, against the stated arithmetic: nine shapes of training at real sizes.

The oracle counts tokens, visible pairs and calls from lengths alone, in loops, and shares no code with the library. A
token costs 2 FLOPs for each weight of the layers; a pair of a query and a key that it sees 4 for each layer and channel
times how much slower attention is than products of matrices; a call a fixed number of FLOPs in each layer. Padded rows
are one causal call each. The sizes of the two models are those of their config.json.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlvr.config import OptimConfig
from rlvr.policy import microbatch
from rlvr.policy.attention import Packing, Spans
from rlvr.policy.attention_speed import SPEEDS, AttentionSpeed
from rlvr.policy.layer_sizes import LayerSizes
from rlvr.policy.microbatch import Cost
from rlvr.records import Batch, Origin, Rollout, StopReason, Task

MODELS = {"0.5B": (24, 14 * 64, 0.358e9), "7B": (28, 28 * 128, 6.53e9)}
"""Layers, channels of the queries of a layer, and weights of all layers."""
SHAPES = [
    ("0.5B", 150, 300, 8, 16, 16384),
    ("0.5B", 150, 300, 8, 16, 65536),
    ("7B", 300, 1500, 16, 8, 32768),
    ("7B", 1000, 4000, 16, 4, 65536),
    ("7B", 2000, 8000, 16, 2, 65536),
    ("7B", 1000, 16000, 16, 2, 65536),
    ("7B", 4000, 16000, 16, 2, 131072),
    ("7B", 1000, 32000, 16, 2, 131072),
    ("7B", 4000, 1000, 16, 4, 65536),
]
"""Model, mean tokens of a prompt and of a response, members of a group, groups, tokens of a micro-batch."""
SHORT = ("0.5B", 16, 300, 2, 16, 16384)
"""Too little to share for another call."""


def sizes_of(prompt, response, members, groups):
    """Tokens of each group's prompt, and of each response: [groups], [groups, members]."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(int(prompt * 0.7), int(prompt * 1.3) + 1, groups)
    responses = (response * np.exp(rng.normal(0, 0.3, (groups, members)))).astype(int)
    return prompts, np.clip(responses, 8, 2 * response)


def batch_of(prompts, responses):
    rollouts = []
    for group, (prompt, of_group) in enumerate(zip(prompts, responses, strict=True)):
        for member, own in enumerate(of_group):
            ids = np.full(prompt + own, 3, dtype=np.int64)
            ids[prompt] = 4 + member  # nothing in common beyond the prompt
            rollouts.append(
                Rollout(
                    id=f"{group}/{member}",
                    task=Task(str(group), "?"),
                    group=str(group),
                    member=member,
                    token_ids=ids,
                    origin=np.repeat([Origin.PROMPT, Origin.POLICY], [prompt, own]).astype(np.int8),
                    behaviour_logprobs=np.zeros(len(ids), dtype=np.float32),
                    policy_version=np.zeros(len(ids), dtype=np.int32),
                    stop=StopReason.END,
                )
            )
    return Batch(rollouts)


def chosen(model, prompts, responses, budget, device, speed, monkeypatch, masked_beyond=math.inf, dtype=torch.bfloat16):
    """The layout that the library takes."""
    layers, channels, weights = MODELS[model]
    policy = SimpleNamespace(
        device=torch.device(device),
        dtype=dtype,
        layers=LayerSizes(int(weights), channels, (math.inf,) * layers, masked_beyond),
        packing=Packing(True, True),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    monkeypatch.setattr(microbatch, "speed_of", lambda device: speed)
    batch = batch_of(prompts, responses)
    trained = [rollout.sampled for rollout in batch.rollouts]
    config = OptimConfig(micro_batch_tokens=budget)
    return microbatch._Layouts(policy, batch, np.arange(len(batch)), trained, config).cheapest()


def causal(length):
    """Pairs of a causal run."""
    return length * (length + 1) // 2


def blocks(stretches):
    """(stretches, most queries, most keys) of what is computed side by side, of stretches (queries, keys), longest
    first: one joins a block while at most a quarter of the block's pairs, or 2^14, are padding."""
    made = []
    rows = real = 0
    longest = (0, 0)
    for queries, keys in sorted(stretches, reverse=True):
        padded = (rows + 1) * longest[0] * longest[1]
        if rows and padded - real - queries * keys <= max(1 << 14, 0.25 * padded):
            rows += 1
            real += queries * keys
        else:
            made.append((rows, *longest))
            rows, real, longest = 1, queries * keys, (queries, keys)
    return [*made[1:], (rows, *longest)]


@dataclass
class Oracle:
    """Costs in FLOPs of a step's rollouts, cut at `budget` tokens."""

    model: str
    speed: AttentionSpeed
    prompts: np.ndarray
    responses: np.ndarray
    budget: int
    in_blocks: bool = False

    def total(self, tokens, pairs, calls):
        layers, channels, weights = MODELS[self.model]
        of_pair = 4 * layers * channels * self.speed.pair
        return 2 * weights * tokens + of_pair * pairs + layers * self.speed.call * calls

    def costs(self):
        """FLOPs by layout."""
        return {"padded": self.padded(), "packed": self.packed(), "shared": self.shared()}

    def cuts(self):
        """Lengths of whole rollouts by micro-batch, longest first."""
        lengths = [int(p + r) for p, row in zip(self.prompts, self.responses, strict=True) for r in row]
        cuts: list[list[int]] = []
        for length in sorted(lengths, reverse=True):
            if not cuts or sum(cuts[-1]) + length > self.budget:
                cuts.append([])
            cuts[-1].append(length)
        return cuts

    def padded(self):
        cuts = self.cuts()
        return self.total(sum(len(c) * c[0] for c in cuts), sum(len(c) * causal(c[0]) for c in cuts), len(cuts))

    def packed(self):
        tokens = pairs = calls = 0
        for cut in self.cuts():
            tokens += sum(cut)
            own, count = self.own(cut)
            pairs += own
            calls += count
        return self.total(tokens, pairs, calls)

    def own(self, lengths):
        """(pairs, calls) of runs with themselves."""
        if not self.in_blocks:
            return sum(map(causal, lengths)), 1
        made = blocks([(length, length) for length in lengths])
        return sum(rows * causal(longest) for rows, longest, _ in made), len(made)

    def shared(self):
        tokens = pairs = calls = 0
        for cut in self.shared_cuts():
            runs = []
            asked = {}  # tokens of prompts -> tokens that continue each
            for prompt, members in cut:
                # A prompt whose other members are elsewhere is no run of its own.
                runs += [prompt, *members] if len(members) > 1 else [prompt + members[0]]
                if len(members) > 1:
                    asked.setdefault(prompt, []).append(sum(members))
            tokens += sum(runs)
            own, count = self.own(runs)
            pairs += own
            calls += count
            if self.in_blocks:
                for prompt, continued in asked.items():
                    made = blocks([(queries, prompt) for queries in continued])
                    pairs += sum(rows * queries * keys for rows, queries, keys in made)
                    calls += len(made)
            else:
                pairs += sum(prompt * queries for prompt, continued in asked.items() for queries in continued)
                calls += bool(asked)
        return self.total(tokens, pairs, calls)

    def shared_cuts(self):
        """(prompt, responses) of the groups of each micro-batch: groups by their longest member, members by length; a
        group that is cut computes its prompt again."""
        longest = self.prompts + self.responses.max(1)
        cuts: list[dict[int, list[int]]] = []
        used = 0
        for g in sorted(range(len(longest)), key=lambda g: (-longest[g], g)):
            for own in sorted(map(int, self.responses[g]), reverse=True):
                more = own if cuts and g in cuts[-1] else own + int(self.prompts[g])
                if not cuts or used + more > self.budget:
                    cuts.append({})
                    used = 0
                    more = own + int(self.prompts[g])
                cuts[-1].setdefault(g, []).append(own)
                used += more
        return [[(int(self.prompts[g]), members) for g, members in cut.items()] for cut in cuts]


@pytest.mark.parametrize("device", SPEEDS)
@pytest.mark.parametrize("shape", [*SHAPES, SHORT], ids=str)
def test_the_layout_that_is_cheapest_is_taken(shape, device, monkeypatch):
    model, prompt, response, members, groups, budget = shape
    prompts, responses = sizes_of(prompt, response, members, groups)
    kind = "cpu" if device == "cpu" else "cuda"
    layout = chosen(model, prompts, responses, budget, kind, SPEEDS[device], monkeypatch)
    costs = Oracle(model, SPEEDS[device], prompts, responses, budget, in_blocks=device == "cpu").costs()
    best = min(costs, key=costs.get)
    if device == "cpu" and costs[best] > 0.85 * costs["padded"]:
        best = "padded"
    assert 2 * MODELS[model][2] * layout.cost == pytest.approx(costs[best], rel=1e-6), (best, costs)
    assert layout.shares == (best == "shared")
    if kind == "cuda":
        assert best == ("packed" if shape is SHORT else "shared")


@pytest.mark.parametrize(("dtype", "in_blocks"), [(torch.float32, True), (torch.bfloat16, False)])
def test_float32_on_a_gpu_is_counted_in_tiles(dtype, in_blocks, monkeypatch):
    """Each block of stretches is then a call: with dear calls packed rows of different lengths cost more."""
    prompts, responses = sizes_of(150, 300, 8, 16)
    speed = AttentionSpeed(pair=1.9, call=1e11)
    layout = chosen("0.5B", prompts, responses, 16384, "cuda", speed, monkeypatch, dtype=dtype)
    costs = {tiled: Oracle("0.5B", speed, prompts, responses, 16384, tiled).costs() for tiled in (True, False)}
    best = min(costs[in_blocks], key=costs[in_blocks].get)
    assert costs[True]["packed"] > costs[False]["packed"]
    assert 2 * MODELS["0.5B"][2] * layout.cost == pytest.approx(costs[in_blocks][best], rel=1e-6)
    assert min(costs[True].values()) != pytest.approx(min(costs[False].values()), rel=1e-3)


def test_calls_that_cost_much_are_not_made(monkeypatch):
    """The constants decide: at a hundred times the price of a call short prompts are computed again."""
    prompts, responses = sizes_of(150, 300, 8, 16)
    dear = AttentionSpeed(pair=1.9, call=3.3e12)
    layout = chosen("0.5B", prompts, responses, 16384, "cuda", dear, monkeypatch)
    costs = Oracle("0.5B", dear, prompts, responses, 16384).costs()
    assert min(costs, key=costs.get) != "shared" and not layout.shares


@pytest.mark.parametrize("device", ["A100", "H100"])
@pytest.mark.parametrize(
    ("model", "response", "budget"), [("7B", (40000, 64000), 65536), ("0.5B", (9000, 15000), 16384)]
)
def test_rollouts_that_fill_their_micro_batches_are_packed_on_a_gpu(model, response, budget, device, monkeypatch):
    """Padded and packed rows are then one computation, but for the masks that padded rows of some models need."""
    responses = np.random.default_rng(0).integers(*response, (1, 8))
    prompts = np.asarray([1000])
    taken = []
    real = microbatch._Layouts._padded
    monkeypatch.setattr(microbatch._Layouts, "_padded", lambda self: taken.append(real(self)) or taken[-1])
    layout = chosen(model, prompts, responses, budget, "cuda", SPEEDS[device], monkeypatch)
    assert len(layout.parts) == 8 and layout is not taken[0]
    assert layout.cost == pytest.approx(taken[0].cost, rel=1e-9)


@pytest.mark.parametrize(("beyond", "packed"), [(2000, True), (4000, False)])
def test_rows_with_masks_are_padded_at_no_price(beyond, packed, monkeypatch):
    """Equal rollouts on a CPU are padded, unless that makes a mask."""
    equal = np.full((1, 1), 2000)
    layout = chosen("0.5B", np.asarray([500]), equal, 4096, "cpu", SPEEDS["cpu"], monkeypatch, masked_beyond=beyond)
    padded = Oracle("0.5B", SPEEDS["cpu"], np.asarray([500]), equal, 4096, in_blocks=True).padded()
    assert 2 * MODELS["0.5B"][2] * layout.cost == pytest.approx(padded, rel=1e-9)
    assert ("_packed" in layout.rows.__qualname__) == packed


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("window", [1, 40, 100, 260, 5000])
def test_layers_with_a_window_count_what_they_see(window, layout):
    """A prompt of 100 tokens and responses of 30 and 200, in one layer with a window and two without."""
    cost = Cost(pair=0.01, call=7.0, in_blocks=False, layers=((window, 1), (None, 2)))
    prompt, responses = 100, (30, 200)
    whole = [prompt + own for own in responses]

    def seen(first, end, most):
        return sum(min(position + 1, most) for position in range(first, end))

    if layout == "padded":
        tokens, calls = 2 * max(whole), 3
        pairs = 2 * (seen(0, max(whole), window) + 2 * seen(0, max(whole), 1 << 30))
        got = cost.padded(np.asarray(whole))
    elif layout == "packed":
        tokens, calls = sum(whole), 3
        pairs = sum(seen(0, one, window) + 2 * seen(0, one, 1 << 30) for one in whole)
        got = cost.packed(Spans(np.asarray(whole), np.asarray([-1, -1]), torch.device("cpu")))
    else:
        tokens = prompt + sum(responses)
        # The prompt is a call of its own where all of it is seen.
        calls = (2 if window >= max(whole) else 1) + 2 * 2
        pairs = seen(0, prompt, window) + 2 * seen(0, prompt, 1 << 30)
        pairs += sum(seen(prompt, one, window) + 2 * seen(prompt, one, 1 << 30) for one in whole)
        got = cost.packed(Spans(np.asarray([prompt, *responses]), np.asarray([-1, 0, 0]), torch.device("cpu")))
    assert got == pytest.approx(tokens + 0.01 * pairs + 7.0 * calls, rel=1e-12)
