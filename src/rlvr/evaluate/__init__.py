"""python -m rlvr.evaluate --model PATH --data FILE [--samples N] [--k 1,8,...] [key.path=value ...]
python -m rlvr.evaluate --model PATH --benchmark math-500,gsm8k,mbpp=FILE [...]
python -m rlvr.evaluate --verifier NAME --preferences reward-bench,FILE [verifier.key=value models.NAME.path=PATH ...]

Samples a model on held-out tasks and writes a JSON object: `results` (greedy, mean, pass@k, maj@k, with `--scorer`
best@k, all with bootstrap intervals over tasks, interquartile mean), the same by source and by difficulty, answer
entropy, truncation, and `by_task`, from which `--compare` takes the differences to an earlier result, with paired
intervals, and which tasks each can solve. Tasks are gone through in blocks: memory does not grow with tasks x samples.
Where the model is of a run, the run's configuration holds: its verifier, template, tasks (data.eval), lengths and seed;
else that of `--config`. A benchmark brings its own tasks, prompt, verifier and sampling (rlvr.evaluation.benchmarks).
The command line goes before all of these. Under torchrun every rank samples, and rank 0 writes.

With `--preferences`, `--steps` or `--responses` the verifier is evaluated (a judge, a reward model, a scorer of steps,
rules) on rows with labels: accuracy, swap consistency, F1 of steps, precision and recall, calibration, length bias, by
source; `--model` is needed only by a judge with `backend: policy`.

Exit codes: 0 done, 2 bad input, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP (nothing is written then).
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from rlvr.core.command_name import add_imports, program
from rlvr.core.startup_lines import StartupLines
from rlvr.errors import ConfigError, command

ROWS = {
    "preferences": "chosen and rejected responses: reward-bench, rm-bench ... or data with these columns",
    "steps": "solutions with labelled steps: processbench, or data with these columns",
    "responses": "completions of which `expected` says whether they are right",
}
"""Option -> the labelled rows that it names."""
DEFAULT = " (default: the run's, the benchmark's or that of --config; else {})"
"""Of an option that a configuration sets too."""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    options = make_parser().parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with StartupLines("auto", sys.stderr) as lines:
        lines.say("loading torch and transformers")
        # Torch comes with both, which --help and a misspelt option do not need.
        from rlvr.evaluate.model_evaluation import evaluate_model
        from rlvr.evaluate.verifier_evaluation import evaluate_verifier, kind_of

        if (kind := kind_of(options)) is not None:
            return evaluate_verifier(options, kind)
        if options.threshold is not None:
            raise ConfigError("--threshold is for --steps and --responses")
        return evaluate_model(options)


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    what = "Evaluate a model on held-out tasks, or a verifier on labelled rows."
    parser = argparse.ArgumentParser(prog=program("evaluate"), description=what)
    add = parser.add_argument
    add("--model", metavar="PATH", help="a run folder, a checkpoint, a folder with Hugging Face files, or a hub name")
    add("--data", action="append", metavar="DATA", help="tasks, as data.eval takes them; may be repeated")
    add(
        "--benchmark",
        action="append",
        metavar="NAME[=DATA],...",
        help="published benchmarks with their authors' prompts, verifiers and sampling, from the hub or from DATA: "
        "math-500, aime-2024, gsm8k, humaneval, ifeval ... (docs/evaluation.md lists them); may be repeated",
    )
    add("--samples", type=int, metavar="N", help="responses sampled per task (0: greedy only)" + DEFAULT.format(8))
    add("--k", metavar="1,8,...", help="the k of pass@k and maj@k (default 1 and the samples)")
    add("--scorer", metavar="NAME", help="a reward term that chooses the best of k samples: best@k")
    add("--verifier", metavar="NAME", help="in place of the tasks' own; or the verifier that is evaluated")
    for name, rows in ROWS.items():
        add(
            f"--{name}",
            action="append",
            metavar="NAME|DATA,...",
            help=f"evaluate --verifier on {rows} (docs/evaluation.md); may be repeated",
        )
    add(
        "--threshold",
        type=float,
        metavar="SCORE",
        help="with --steps a step that scores less is rejected (default 0.5), with --responses a response is accepted "
        "from this score on (default: with full marks)",
    )
    add_imports(parser)
    add("--engine", metavar="NAME", help="hf (default), vllm or vllm-server")
    add("--temperature", type=float, metavar="T", help="of the samples" + DEFAULT.format(1))
    add("--max-new-tokens", type=int, metavar="N", help="longest response" + DEFAULT.format(256))
    add("--limit", type=int, metavar="N", help="use only the first so many tasks")
    add("--no-greedy", action="store_true", help="no greedy response")
    add("--seed", type=int, metavar="N", help="of the samples" + DEFAULT.format(0))
    add(
        "--config",
        metavar="FILE|RECIPE",
        help="configuration of a run: model, template, verifier, engine ...; also the name of a published recipe",
    )
    add("--compare", metavar="RESULT", help="an earlier result on the same tasks")
    add("--contamination", metavar="DATA", help="training tasks in which the tasks are looked for")
    add(
        "--output",
        metavar="FILE",
        help="where the JSON goes (default: standard output); an earlier result there is replaced",
    )
    add("overrides", nargs="*", metavar="key.path=value", help="settings of the configuration")
    return parser
