"""What the engine tests share: tiny policies, ways to ask an engine, and references that use no cache and no batch."""

import asyncio
import copy
import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from rlvr.config import LoraConfig, ModelConfig, ScratchConfig
from rlvr.core.needs import CURRENT, Need
from rlvr.policy import Policy, forward, load_policy, rows_of
from rlvr.records import Batch, Task
from rlvr.rollout import Request, RolloutContext, Sampling, make_rollout
from rlvr.rollout.decoder_parts import UnfitError
from rlvr.rollout.hf import Decoder
from rlvr.rollout.rows import CachePlan, uniforms

PATIENCE = 60  # seconds: generous, since the machine is shared
LETTERS = "abcdefghijkl 01\n"


@dataclass(frozen=True)
class DrawOf:
    """One draw of a task."""

    number: int = 0
    task: Task = field(default_factory=lambda: Task("t", "?"))


def small(architecture="qwen3", seed=0, adapter=None, sliding_window=None, dtype="auto", **options):
    """A policy with 22 tokens, so that a random one ends about every twentieth token."""
    scratch = {
        "architecture": architecture,
        "hidden_size": 32,
        "layers": 2,
        "intermediate_size": 48,
        "context": 96,
        "init_std": 0.2,
        "alphabet": LETTERS,
        **options,
    }
    lora = None if adapter is None else LoraConfig(**adapter)
    policy = load_policy(ModelConfig(scratch=ScratchConfig(**scratch), device="cpu", adapter=lora, dtype=dtype), seed)
    if sliding_window is None:
        return policy
    config = copy.deepcopy(policy.causal_lm.config)
    config.sliding_window = sliding_window
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(policy.causal_lm.state_dict())
    return Policy(model.eval(), policy.tokenizer)


def ids_of(policy, text):
    return tuple(policy.tokenizer.encode(text, add_special_tokens=False))


def some_requests(policy, count, seed=0, longest=20, distinct=None, **sampling):
    """Requests with random prompts of different lengths, `distinct` prompts among them, each with its own seed."""
    random = np.random.default_rng(seed)
    low, high = 3, len(policy.tokenizer)
    prompts = [tuple(random.integers(low, high, size=random.integers(1, longest + 1)).tolist()) for _ in range(count)]
    options = Sampling(**{"max_new_tokens": 24, **sampling})
    return [Request(prompts[i % (distinct or count)], options, 1000 * seed + i) for i in range(count)]


async def ask_all(engine, requests, late=0, ticks=12):
    """Completions of all requests; the last `late` are handed in one by one, `ticks` turns of the loop apart."""
    tasks = [asyncio.ensure_future(engine.generate(r)) for r in requests[: len(requests) - late]]
    for request in requests[len(requests) - late :]:
        for _ in range(ticks):
            await asyncio.sleep(0)
        tasks.append(asyncio.ensure_future(engine.generate(request)))
    return await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)


def ask(engine, requests, **how):
    return asyncio.run(ask_all(engine, requests, **how))


def compared(policy, steps=20, seed=0, model=None):
    """(the decoder, the largest difference of its logits from a pass of `model` over the whole sequences, without cache
    or padding); the policy's own model unless another is given."""
    model = model or policy.model
    random = np.random.default_rng(seed)
    lengths = np.asarray([1, 4, 9])
    tokens = torch.from_numpy(random.integers(3, len(policy.tokenizer), size=(3, 9 + steps)))
    decoder, worst = Decoder(policy), 0.0

    def check(result, count):
        nonlocal worst
        for row, length in enumerate(lengths):
            whole = model(input_ids=tokens[row : row + 1, : length + count]).logits[0, -1]
            worst = max(worst, float((result[row] - whole).abs().max() / whole.abs().max().clamp_min(1.0)))

    with torch.inference_mode():
        prompts = [tuple(tokens[row, :length].tolist()) for row, length in enumerate(lengths)]
        logits, cache = decoder.read(prompts, np.arange(3), CachePlan(3, 9 + steps), joins=False)
        check(logits, 0)
        for count in range(steps):
            places = lengths + count
            ids = tokens[torch.arange(3), torch.from_numpy(places)]
            check(decoder.next_logits(ids, torch.from_numpy(places), places, cache), count + 1)
    return decoder, worst


def trainer_logprobs(policy, requests, completions):
    """What the trainer computes for the sampled tokens, one array per completion."""
    rollouts = [
        make_rollout(DrawOf(i), 0, request, completion)
        for i, (request, completion) in enumerate(zip(requests, completions, strict=True))
    ]
    return recomputed(policy, rollouts)


def recomputed(policy, rollouts):
    trained = [r.sampled for r in rollouts]
    rows = rows_of(Batch(rollouts), np.arange(len(rollouts)), trained, policy.tokenizer.pad_token_id, policy.device)
    with torch.no_grad():
        values = forward(policy, rows, [Need("logprobs")])["logprobs", CURRENT].numpy()
    return np.split(values, np.cumsum([int(t.sum()) for t in trained])[:-1])


def gap(policy, requests, completions):
    """The largest difference of the engine's log-probs from the trainer's."""
    expected = trainer_logprobs(policy, requests, completions)
    return max(float(np.abs(c.logprobs - e).max()) for c, e in zip(completions, expected, strict=True))


def kept(probabilities, top_k=0, top_p=1.0, min_p=0.0):
    """The tokens that truncation leaves, by the definitions, in Python floats."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    likely = [i for i in order if i == order[0] or probabilities[i] >= min_p * probabilities[order[0]]]
    likely = likely[:top_k] if top_k else likely
    if top_p >= 1:
        return set(likely)
    nucleus, total, of = set(), 0.0, sum(probabilities[i] for i in likely)
    for i in likely:
        if total >= top_p:
            break
        nucleus.add(i)
        total += probabilities[i] / of
    return nucleus


def reference(policy, request):
    """(tokens, log-probs) sampled without cache, batch or padding: the whole sequence again for every token."""
    sampling, ids, logprobs = request.sampling, list(request.token_ids), []
    uniform = uniforms(request.seed, sampling.max_new_tokens).tolist()
    while len(ids) < policy.context and len(logprobs) < sampling.max_new_tokens:
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([ids])).logits[0, -1].double().numpy()
        logits = logits / (sampling.temperature or 1.0)
        weights = np.exp(logits - logits.max())
        probabilities = weights / weights.sum()
        chosen = kept(probabilities.tolist(), sampling.top_k, sampling.top_p, sampling.min_p)
        probabilities = np.where([i in chosen for i in range(len(logits))], probabilities, 0.0)
        probabilities /= probabilities.sum()
        if sampling.temperature == 0:
            token = int(probabilities.argmax())
        else:
            token = int(np.searchsorted(probabilities.cumsum(), uniform[len(logprobs)], side="right"))
        ids.append(token)
        logprobs.append(math.log(probabilities[token]))
        if token in policy.end_ids and not sampling.ignore_eos:
            break
    return ids[len(request.token_ids) :], logprobs


def _unproven(policy):
    raise UnfitError("a test looks on")


class Spy:
    """Stands in for policy.next_logits and remembers the shapes of its inputs; `before` may raise.

    Every step then goes through the model's own modules, where it can be seen.
    """

    def __init__(self, monkeypatch, policy, before=lambda spy: None, after=lambda input_ids, logits: logits):
        self.real, self.shapes = policy.next_logits, []
        self.before, self.after = before, after
        monkeypatch.setattr(policy, "next_logits", self, raising=False)
        monkeypatch.setattr("rlvr.rollout.hf.proven", _unproven)

    def __call__(self, input_ids, attention_mask, position_ids, cache):
        self.shapes.append(tuple(input_ids.shape))
        self.before(self)
        return self.after(input_ids, self.real(input_ids, attention_mask, position_ids, cache))

    @property
    def prefills(self):
        return [shape for shape in self.shapes if shape[1] > 1]

    @property
    def decoded_rows(self):
        return [shape[0] for shape in self.shapes if shape[1] == 1]


def chain(monkeypatch, policy, following):
    """Make the policy write what `following` says: {token id: next token id}."""

    def after(input_ids, logits):
        forced = torch.full_like(logits, -torch.inf)
        for row, last in enumerate(input_ids[:, -1].tolist()):
            forced[row, following[last]] = 0.0
        return forced

    return Spy(monkeypatch, policy, after=after)


def alphabet_chain(policy, text, end=False):
    """{token: next token} along the characters of `text`; then the end token, or round again."""
    ids = [policy.tokenizer.convert_tokens_to_ids(c) for c in text]
    return dict(zip(ids, [*ids[1:], policy.tokenizer.eos_token_id if end else ids[0]], strict=True))


@torch.no_grad()
def shake(policy, seed, size=0.1):
    """Change every trainable weight at random."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.trainable().values():
        parameter += size * torch.randn(parameter.shape, generator=generator)


async def unjudged(rollout):
    return rollout


def context_of(
    generate,
    verify=unjudged,
    encode=lambda task: (1, 2, 3),
    reply=lambda task, text, role, end: (7,),
    context=64,
    seed_path=(0, "rollout"),
    sampling=None,
    group_size=4,
    by_group=lambda task: False,
    **more,
):
    """A RolloutContext over functions in the place of the engine, the verifier and the prompts."""

    class Tokens:
        def __call__(self, task):
            return encode(task)

        def reply(self, *arguments):
            return reply(*arguments)

    return RolloutContext(
        engine=SimpleNamespace(generate=generate),
        verification=SimpleNamespace(verify=verify, by_group=by_group),
        prompts=Tokens(),
        sampling=sampling or Sampling(12),
        group_size=group_size,
        context=context,
        history={},
        seed_path=seed_path,
        **more,
    )


class Casts(TorchDispatchMode):
    """Sizes of tensors that are cast from float32 to bfloat16, by dispatched operation."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with self:  # in inference mode composite operations come whole
            result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        result = func(*args, **(kwargs or {}))
        source = {"aten::_to_copy": 0, "aten::copy_": 1}.get(func._schema.name)
        if source is not None and args[source].dtype == torch.float32 and result.dtype == torch.bfloat16:
            self.sizes.append(args[source].numel())
        return result
