"""A judge with a rubric: a language model says which criteria a response meets. Here a stub stands in for it.

    python docs/examples/judge.py

A real judge: take the stub away, and set `urls` to a server such as `vllm serve Qwen/Qwen3-32B`, `model` to its name
and, for a service, `key` to the environment variable with the key. A real model as the policy: `model: {path:
Qwen/Qwen2.5-1.5B-Instruct}`.
"""

import json

from rlvr import GRPOTrainer
from rlvr.testing import StubJudge

WORDS = ["please ", "thank you ", "give me ", "now ", "the salt", "!"]
CRITERIA = [
    {"text": "It says please or thank you.", "name": "polite", "weight": 2},
    {"text": "It names what is wanted.", "name": "clear"},
    {"text": "It is one short sentence.", "name": "short"},
    {"text": "It shouts.", "name": "rude", "weight": -1},
]
CONFIG = {
    "run": {"name": "judge", "seed": 0, "steps": 40},
    "model": {
        "device": "cpu",
        "scratch": {
            "init_std": 0.1,
            "hidden_size": 64,
            "layers": 1,
            "intermediate_size": 128,
            "context": 32,
            "alphabet": "?",
            "words": WORDS,
        },
    },
    "rollout": {"prompts_per_step": 2, "group_size": 16, "max_new_tokens": 6},
    "optim": {"lr": 3e-3},
}


def reply(request):
    """The stub's verdict on each criterion; a real judge reads the response between its fences in the same way."""
    response = request.fenced["response"]
    met = [
        "please" in response or "thank you" in response,
        "the salt" in response,
        len(response.split()) <= 6,
        "!" in response or "now" in response,
    ]
    return json.dumps({"code": request.code, "met": {str(number): one for number, one in enumerate(met, start=1)}})


def main() -> None:
    """Train."""
    with StubJudge(reply) as stub:
        verifier = {"name": "rubric", "urls": stub.url, "model": "stub", "criteria": CRITERIA}
        with GRPOTrainer(tasks=["?", "??"], verifier=verifier, config=CONFIG) as trainer:
            trainer.train()
            print(trainer.batch.rollouts[0].text)


if __name__ == "__main__":
    main()
