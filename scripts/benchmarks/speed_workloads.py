"""The workloads of the side-by-side benchmark, and what both sides share: the model's files, the prompts, the
stopwatch.

It imports nothing of rlvr and nothing of TRL, so that it runs in either's environment. Invariant: a side gets the same
model files, prompts, reward and learning settings as the other; nothing of a workload is written a second time
elsewhere.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

CHARACTERS = "0123456789=:k+- "
SPECIAL = ("<pad>", "<eos>", "<unk>")


@dataclass(frozen=True)
class Workload:
    """One size of model, batch and completions. The reward is the share of even digits in a completion."""

    text: str
    """What it stands for, in words."""
    prompts: int = 8
    group: int = 8
    new_tokens: int = 32
    """Longest completion; an end-of-sequence token ends one before, for both sides."""
    micro_batch: int | None = None
    """Completions in one forward and backward pass; None: all of a step's."""
    prompt_length: int = 4
    hidden: int = 64
    layers: int = 2
    vocabulary: int = 19
    reward: str = "even"
    """even: share of even digits; parity: share of even token ids, for vocabularies whose tokens have no text."""
    reward_seconds: float = 0.0
    """What the verifier waits for each completion."""
    flat: float = 0.0
    """The share of the prompts that pays every completion alike."""
    learning_rate: float = 3e-3
    dropped: int = 3
    """Steps at the start that are not counted."""
    counted: int = 12
    """Steps whose median counts."""

    @property
    def steps(self) -> int:
        """Optimizer steps of one run, one for each batch."""
        return self.dropped + self.counted


WORKLOADS = {
    "W1": Workload("short: 64 completions of at most 32 tokens"),
    "W2": Workload("ragged: at most 256 tokens", new_tokens=256, micro_batch=8, dropped=2, counted=8),
    "W3": Workload("a verifier of 20 ms a completion", reward_seconds=0.02, dropped=2, counted=6),
    "W4": Workload(
        "a vocabulary of 32,000",
        new_tokens=64,
        hidden=128,
        layers=4,
        vocabulary=32000,
        reward="parity",
        dropped=1,
        counted=3,
    ),
    "W5": Workload(
        "prompts of 512 tokens", prompts=4, group=16, new_tokens=64, prompt_length=512, dropped=2, counted=5
    ),
    "W6": Workload("half of the groups all equal", flat=0.5),
}


def score(workload: Workload, prompt: str, completion: str, token_ids: list[int]) -> float:
    """The reward of one completion."""
    if workload.reward_seconds:
        time.sleep(workload.reward_seconds)
    if workload.reward == "parity":
        return sum(token % 2 == 0 for token in token_ids) / max(1, len(token_ids))
    if int(prompt[-2]) < 10 * workload.flat:
        return 0.5
    return sum(character in "02468" for character in completion) / max(1, len(completion))


def prompts(workload: Workload) -> list[str]:
    """640 prompts `k=D:`, each of the ten digits as often as the others, filled up with zeros on the left."""
    return ["0" * (workload.prompt_length - 4) + f"k={digit}:" for digit in "0123456789" * 64]


def write_model(workload: Workload, folder: Path) -> int:
    """A Qwen2 with random weights, which depend on nothing but the workload, and its character tokenizer;
    parameters."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    entries = [*SPECIAL, *CHARACTERS]
    raw = Tokenizer(models.WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token=SPECIAL[2]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token=SPECIAL[0], eos_token=SPECIAL[1], unk_token=SPECIAL[2], padding_side="left"
    )
    config = Qwen2Config(
        vocab_size=workload.vocabulary,
        hidden_size=workload.hidden,
        intermediate_size=4 * workload.hidden,
        num_hidden_layers=workload.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass
class Stopwatch:
    """The steps of one run: when each ended, what each sampled, and the seconds of each in each phase."""

    ends: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before_mib = high_water_mib()

    def summary(self, workload: Workload) -> dict[str, object]:
        """Medians over the steps that count. A step lasts from the end of the one before it to its own end."""
        seconds = [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)][-workload.counted :]
        tokens, phases = self.tokens[-workload.counted :], self.phases[-workload.counted :]
        if not len(seconds) == len(tokens) == len(phases) == workload.counted:
            raise RuntimeError(f"{len(self.ends)} steps ended, {len(self.tokens)} were scored: the run was cut short")
        return {
            "step_seconds": statistics.median(seconds),
            "step_seconds_all": [round(one, 5) for one in seconds],
            "tokens_per_step": statistics.mean(tokens),
            "phase_seconds": {name: statistics.median(one[name] for one in phases) for name in phases[0]},
            "peak_mib": high_water_mib(),
            "before_mib": self.before_mib,
            "reward_first": self.rewards[0],
            "reward_last": self.rewards[-1],
        }


def high_water_mib() -> float:
    """Most resident memory that this process ever had. Unlike getrusage's, it does not begin at the parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status says no VmHWM: this benchmark needs Linux")
