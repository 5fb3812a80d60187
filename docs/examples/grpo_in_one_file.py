"""GRPO in one file: a small language model learns to add, first from 200 worked solutions, then by trial and error.

    python docs/examples/grpo_in_one_file.py      # some minutes on a CPU; `--sft-steps 3 --steps 3` for a quick look

A step of GRPO (group relative policy optimization, Shao et al. 2024, arXiv 2402.03300) has four parts:

    sample     several completions of each of many questions; the completions of one question are a group
    verify     each completion: its reward is 1 if its answer is right, else 0
    compare    rewards within each group: the advantage of a completion says how much better than its group it did
    update     the weights, so that completions with a positive advantage become more likely and the others less

Task, model and settings are those of configs/quickstart.yaml, names those of docs/glossary.md. Letters of shapes, as in
docs/shapes.md: B rollouts (a rollout is a completion with its prompt), L tokens of the longest rollout, to which the
others are padded, V entries of the vocabulary, G groups.
"""

import argparse
import hashlib
import math
import random
import re
import time
from collections.abc import Callable
from types import SimpleNamespace as Settings
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM

# Stage 1, supervised fine-tuning (SFT) on demonstrations, until that stops helping; then stage 2, GRPO.
SFT = Settings(prompts_per_step=32, lr=2e-3, min_lr=0.0, warmup_steps=50, weight_decay=0.1, betas=(0.9, 0.99))
GRPO = Settings(prompts_per_step=96, lr=4e-4, min_lr=4e-5, warmup_steps=15, weight_decay=0.0, betas=(0.9, 0.999))
DEMONSTRATIONS = 200
GROUP_SIZE = 8  # completions of each question in a step of GRPO
MAX_NEW_TOKENS = 48
CLIP = 0.2
MICRO_BATCH_SIZE = 128


class Task(NamedTuple):
    """A question, its answer, and a demonstration: a worked solution, which only the first stage reads."""

    prompt: str
    answer: str
    demonstration: str


def arithmetic(count: int, split: str) -> list[Task]:
    """Different additions of two numbers of three digits, for `train` or for `eval`."""
    numbers = random.Random(split)
    tasks: dict[str, Task] = {}
    while len(tasks) < count:
        a, b = (numbers.randrange(100, 1000) for _ in range(2))
        question = f"{a}+{b}=?"
        # A hash of the question decides its split, so that no question of the evaluation is ever trained on.
        held_out = hashlib.sha256(question.encode()).digest()[0] < 26  # a tenth of the 256 values of a byte
        if held_out == (split == "eval"):
            tasks[question] = Task(question, str(a + b), f"{worked_columns(a, b)} #### {a + b}")
    return list(tasks.values())


def worked_columns(a: int, b: int) -> str:
    """The columns of an addition, last digit first, each as digit+digit+carry=sum: 7+8+0=15,7+9+1=17,4+2+1=07."""
    carry = 0
    columns = []
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        columns.append(f"{x}+{y}+{carry}={total:02d}")
        carry = total // 10
    return ",".join(columns)


def verify(task: Task, completion: str) -> float:
    """The reward: 1 if the completion ends in the right answer, else 0. What stands before the answer is not judged."""
    return float(completion.endswith(f"#### {task.answer}"))


# A token is one of four special tokens, or `#### `, or a character.
VOCABULARY = ["<pad>", "<eos>", "<|user|>", "<|assistant|>", "#### ", *"0123456789+=,? "]
PAD, END, USER, ASSISTANT = range(4)


def encode(text: str) -> list[int]:
    """Token ids of a text."""
    return [VOCABULARY.index(part) for part in re.findall(r"#### |.", text)]


def build_model() -> Qwen3ForCausalLM:
    """The policy, which is the model that is trained: a Qwen3 of 371 thousand random weights, in float32."""
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=len(VOCABULARY), pad_token_id=PAD, **sizes, **heads))


class Batch(NamedTuple):
    """B rollouts as rows of one length L: the prompt, padded on the left, and the completion, padded on the right."""

    token_ids: torch.Tensor  # int64 [B, L]
    attention_mask: torch.Tensor  # int64 [B, L]: 1 at tokens, 0 at padding
    trained: torch.Tensor  # bool [B, L]: the tokens of the completion, its end token included
    behaviour_logprobs: torch.Tensor  # float32 [B, L]: log-prob of each trained token when it was sampled; elsewhere 0


@torch.no_grad()
def sample(model: Qwen3ForCausalLM, tasks: list[Task], greedy: bool = False) -> Batch:
    """One completion of each task, decoded together: sampled at temperature 1, or always the likeliest token."""
    prompts = [torch.tensor([USER, *encode(task.prompt), ASSISTANT]) for task in tasks]
    # Padded on the left, all prompts end in the same column, whose logits predict the next token of every row.
    token_ids = pad_sequence(prompts, batch_first=True, padding_value=PAD, padding_side="left")
    attention_mask = (token_ids != PAD).long()
    trained = torch.zeros_like(token_ids, dtype=torch.bool)
    behaviour_logprobs = torch.zeros(token_ids.shape)
    running = torch.ones(len(tasks), 1, dtype=torch.bool)  # [B, 1]: the rows that have not sampled their end token
    cache = None  # keys and values of the tokens that the model has seen
    unseen = token_ids
    for _ in range(MAX_NEW_TOKENS):
        output = model(unseen, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logprobs = output.logits[:, -1].log_softmax(-1)  # [B, V]
        unseen = logprobs.argmax(-1, keepdim=True) if greedy else torch.multinomial(logprobs.exp(), 1)  # [B, 1]
        unseen = torch.where(running, unseen, PAD)
        # The sampled ids are trained on as they are: the text, encoded again, could give others.
        token_ids = torch.cat([token_ids, unseen], 1)
        attention_mask = torch.cat([attention_mask, running.long()], 1)
        trained = torch.cat([trained, running], 1)
        behaviour_logprobs = torch.cat([behaviour_logprobs, logprobs.gather(-1, unseen) * running], 1)
        running = running & (unseen != END)
        if not running.any():
            break
    return Batch(token_ids, attention_mask, trained, behaviour_logprobs)


def completions(batch: Batch) -> list[str]:
    """The text of each completion, without special tokens."""
    rows = [row[trained].tolist() for row, trained in zip(batch.token_ids, batch.trained, strict=True)]
    return ["".join(VOCABULARY[token] for token in row if token > ASSISTANT) for row in rows]


def token_logprobs(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    """[B, L]: the log-prob of each trained token under the current weights, with gradient; elsewhere 0."""
    # The logits at a token predict the next one, so those of columns 0 to L - 2 predict columns 1 to L - 1.
    logits = model(batch.token_ids, attention_mask=batch.attention_mask).logits[:, :-1]  # [B, L - 1, V]
    logprobs = logits.log_softmax(-1).gather(-1, batch.token_ids[:, 1:, None]).squeeze(-1)  # [B, L - 1]
    return torch.nn.functional.pad(logprobs, (1, 0)) * batch.trained


def group_advantage(rewards: torch.Tensor, epsilon: float = 1e-4) -> torch.Tensor:
    """[G, GROUP_SIZE]: A = (r - mean(r)) / std(r) in each group (Shao et al. 2024, section 4.1.2); epsilon avoids a
    division by 0. The mean is the reward to be expected, for which PPO trains a second model."""
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True, correction=0) + epsilon)


def clipped_policy_loss(logprobs: torch.Tensor, batch: Batch, advantage: torch.Tensor, tokens: int) -> torch.Tensor:
    """-sum_t min(rho A, clip(rho, 1 - CLIP, 1 + CLIP) A) / tokens, with rho = pi / pi_behaviour of each trained token
    (PPO, Schulman et al. 2017, arXiv 1707.06347, equation 7). `logprobs`: [B, L], log pi. `advantage`: [B], A."""
    # At rho = 1 the gradient is that of -A log pi; where rho has moved out of the range in A's direction there is none.
    ratio = (logprobs - batch.behaviour_logprobs).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    surrogate = torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])  # [B, L]
    return -(surrogate * batch.trained).sum() / tokens


def add_policy_gradient(model: Qwen3ForCausalLM, batch: Batch, advantage: torch.Tensor) -> None:
    """Add the gradient of the loss of the whole batch, computed a micro-batch at a time. `advantage`: [B]."""
    # Counted before the batch is cut: with a mean over each micro-batch, the gradient would depend on the cut.
    tokens = int(batch.trained.sum())
    # Where all rewards of a group are equal, advantages and gradient are 0; its tokens are counted all the same.
    with_signal = advantage.nonzero().squeeze(-1)
    for start in range(0, len(with_signal), MICRO_BATCH_SIZE):
        rows = with_signal[start : start + MICRO_BATCH_SIZE]
        part = Batch(*(tensor[rows] for tensor in batch))
        clipped_policy_loss(token_logprobs(model, part), part, advantage[rows], tokens).backward()


def sft(model: Qwen3ForCausalLM, tasks: list[Task]) -> float:
    """Add the gradient of a step of stage 1, which makes the tokens of demonstrations likely; the loss."""
    rows = [([USER, *encode(task.prompt), ASSISTANT], [*encode(task.demonstration), END]) for task in tasks]
    token_ids = pad_sequence([torch.tensor(p + c) for p, c in rows], batch_first=True, padding_value=PAD)
    trained = pad_sequence([torch.tensor([False] * len(p) + [True] * len(c)) for p, c in rows], batch_first=True)
    batch = Batch(token_ids, (token_ids != PAD).long(), trained, torch.zeros(token_ids.shape))
    loss = -token_logprobs(model, batch).sum() / trained.sum()
    loss.backward()
    return loss.item()


def grpo(model: Qwen3ForCausalLM, tasks: list[Task]) -> float:
    """Add the gradient of a step of stage 2, in which only answers are checked; the mean reward."""
    members = [task for task in tasks for _ in range(GROUP_SIZE)]  # B, group by group
    batch = sample(model, members)
    rewards = torch.tensor([verify(task, text) for task, text in zip(members, completions(batch), strict=True)])
    advantage = group_advantage(rewards.view(len(tasks), GROUP_SIZE)).flatten()
    add_policy_gradient(model, batch, advantage)
    return rewards.mean().item()


def learning_rate(settings: Settings, step: int, steps: int) -> float:
    """A linear warm-up to `lr`, then half a cosine wave down to `min_lr`."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    return settings.min_lr + (settings.lr - settings.min_lr) * (1 + math.cos(math.pi * done)) / 2


def run_stage(backward: Callable, model: Qwen3ForCausalLM, tasks: list[Task], settings: Settings, steps: int) -> None:
    """Take `steps` optimizer steps, each with the gradient that `backward` computes for the next tasks."""
    # Weight decay is for matrices only, not for the scales of norms.
    groups = [{"params": [p], "weight_decay": settings.weight_decay if p.ndim > 1 else 0.0} for p in model.parameters()]
    optimizer = torch.optim.AdamW(groups, betas=settings.betas)
    order: list[Task] = []
    for step in range(steps):
        if len(order) < settings.prompts_per_step:  # a new epoch: all tasks in a new order
            order += random.sample(tasks, len(tasks))
        result = backward(model, [order.pop(0) for _ in range(settings.prompts_per_step)])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # a longer gradient is scaled down to a norm of 1
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step, steps)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            print(f"{backward.__name__} {step + 1}/{steps}  {result:.3f}", flush=True)


def evaluate(model: Qwen3ForCausalLM, tasks: list[Task]) -> float:
    """The share of tasks whose greedy completion is right."""
    return sum(map(verify, tasks, completions(sample(model, tasks, greedy=True)))) / len(tasks)


def train(seed: int, sft_steps: int = 300, steps: int = 90) -> tuple[float, float]:
    """Run both stages; the accuracy on held-out tasks after each."""
    random.seed(seed)  # of the order of tasks
    torch.manual_seed(seed)  # of the first weights and of sampling
    tasks = arithmetic(20000, "train")
    held_out = arithmetic(256, "eval")
    model = build_model()
    run_stage(sft, model, tasks[:DEMONSTRATIONS], SFT, sft_steps)
    after_sft = evaluate(model, held_out)
    run_stage(grpo, model, tasks, GRPO, steps)
    return after_sft, evaluate(model, held_out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO in one file, on the task of the quickstart.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=90, help="of GRPO")
    options = parser.parse_args()
    accuracy = train(options.seed, options.sft_steps, options.steps)
    seconds = f"{time.process_time():.0f} CPU seconds"
    print(f"held-out accuracy, greedy: {accuracy[0]:.3f} after sft, {accuracy[1]:.3f} after grpo; {seconds}")
