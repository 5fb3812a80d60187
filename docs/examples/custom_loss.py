"""A loss of your own: GRPO whose ratio is not clipped, but pulled back to 1 by a quadratic penalty.

    python docs/examples/custom_loss.py

A real model: GRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", ...) with tasks from the hub; the loss stays as it is. In a YAML
file it is `algorithm: {loss: {name: "docs/examples/custom_loss.py:QuadraticPenalty", weight: 1.0}}`.
"""

from dataclasses import dataclass

from rlvr import GRPOTrainer, register_loss
from rlvr.core.needs import PROXIMAL, Need
from rlvr.losses import Average, Denominators, Loss, LossTerm, TokenBatch

CONFIG = {
    "run": {"name": "custom_loss", "seed": 0, "steps": 60},
    "model": {
        "device": "cpu",
        "scratch": {
            "init_std": 0.1,
            "hidden_size": 64,
            "layers": 1,
            "intermediate_size": 128,
            "context": 32,
            "alphabet": "0123456789>",
        },
    },
    "rollout": {"prompts_per_step": 10, "group_size": 12, "max_new_tokens": 4, "ignore_eos": True},
    "algorithm": {"loss": {"name": "quadratic_penalty", "weight": 1.0}},
    "optim": {"lr": 1e-2, "updates_per_batch": 2},
}


@register_loss("quadratic_penalty")
@dataclass(frozen=True)
class QuadraticPenalty(Loss):
    """-(ratio x advantage - weight / 2 x (ratio - 1)^2), a mean over the trained tokens of the optimizer step."""

    weight: float = 1.0
    average: Average = "tokens"
    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", PROXIMAL)})

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        """One value for each trained token [T], averaged over counts of the whole step."""
        ratio = (tokens.logprobs - tokens.proximal_logprobs).clamp(-20, 20).exp()
        value = ratio * tokens.advantage - self.weight / 2 * (ratio - 1) ** 2
        return LossTerm(-tokens.average(value, self.average, over), {"ratio/mean": ratio.detach()})


def descending(prompt, completion):
    """The share of digits that continue the prompt's: `7>` wants 6543, and 0 is followed by 9."""
    wanted = [str((int(prompt[0]) - place) % 10) for place in range(1, 5)]
    return sum(one == other for one, other in zip(completion, wanted, strict=False)) / 4


def main() -> None:
    """Train."""
    with GRPOTrainer(tasks=[f"{digit}>" for digit in range(10)], verifier=descending, config=CONFIG) as trainer:
        trainer.train()


if __name__ == "__main__":
    main()
