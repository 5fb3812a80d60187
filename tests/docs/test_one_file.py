"""docs/examples/grpo_in_one_file.py: short, without code of the library, with its settings, numbers and names.
docs/one-file.md: the page quotes the file, and the modules that it names exist."""

from __future__ import annotations

import ast
import copy
import importlib.util
import pkgutil
import re
import runpy
import sys
import textwrap

import numpy as np
import pytest
import torch

from rlvr import registry
from rlvr.advantages.group import GroupAdvantage, group_advantage
from rlvr.config.config_loading import load_config
from rlvr.config.stage_plan import stage_plans
from rlvr.core.needs import CURRENT
from rlvr.core.specs import ComponentSpec
from rlvr.data.arithmetic import arithmetic
from rlvr.losses import ClippedPolicyLoss, Denominators, TokenBatch
from rlvr.policy import load_policy
from rlvr.records import Task
from rlvr.stages.stage_base import learning_rate


@pytest.fixture(scope="module")
def path(root):
    return root / "docs/examples/grpo_in_one_file.py"


@pytest.fixture(scope="module")
def page(root):
    return (root / "docs/one-file.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def example(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plans(root):
    """The stages of the quickstart, sft and grpo, with the library's defaults."""
    return stage_plans(load_config(str(root / "configs/quickstart.yaml")))


@pytest.fixture(scope="module")
def band(root):
    """The lowest and the highest accuracy of the library's own runs, from the table of README.md."""
    row = r"^\| \d \| [\d.]+ % \| ([\d.]+) % \| \d+:\d+ \|$"
    shares = [
        round(float(percent) / 100, 3) for percent in re.findall(row, (root / "README.md").read_text(), re.MULTILINE)
    ]
    assert len(shares) == 3
    return min(shares), max(shares)


@pytest.fixture
def batch(example):
    """A model in double precision, and twelve rollouts of prompts of different lengths."""
    torch.manual_seed(1)
    model = example.build_model().double()
    tasks = [example.Task(prompt, "", "") for prompt in ("1+2=?", "100+200=?", "7?", "12+34=?")]
    return model, example.sample(model, tasks * 3)


def test_it_is_short_and_imports_nothing_of_the_library(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}
    assert {module.split(".")[0] for module in modules} - sys.stdlib_module_names == {"torch", "transformers"}


def test_the_page_quotes_the_file(path, page):
    """Lines that stand one after the other, without the indentation that they have in common."""
    lines = path.read_text(encoding="utf-8").splitlines()
    quotes = [block.splitlines() for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)]
    assert len(quotes) >= 8
    for quote in quotes:
        runs = (textwrap.dedent("\n".join(lines[i : i + len(quote)])) for i in range(len(lines)))
        assert "\n".join(quote) in runs


def test_every_function_has_a_row_in_the_table_of_the_page(path, page):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    table = [line for line in page.splitlines() if line.startswith("| `")]
    named = {name for line in table for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert named == defined


def test_modules_that_the_page_names_exist(page):
    named = set(re.findall(r"`(rlvr\.[\w.]+)`", page))
    assert len(named) >= 8
    for name in named:
        pkgutil.resolve_name(name)


def test_the_settings_are_those_of_the_quickstart(example, plans):
    sft, grpo = plans
    for stage, settings in ((sft, example.SFT), (grpo, example.GRPO)):
        optim = stage.config.optim
        written = {"betas": (0.9, 0.999), "weight_decay": 0.0} | optim.optimizer.options
        assert stage.config.rollout.prompts_per_step == settings.prompts_per_step
        assert (optim.lr, optim.min_lr, optim.warmup_steps) == (settings.lr, settings.min_lr, settings.warmup_steps)
        assert (written["weight_decay"], tuple(written["betas"])) == (settings.weight_decay, settings.betas)
        assert optim.schedule == "cosine" and optim.max_grad_norm == 1 and optim.optimizer.name == "adamw"
    assert (sft.steps, grpo.steps) == example.train.__defaults__
    assert sft.config.data.limit == example.DEMONSTRATIONS
    rollout, optim, algorithm = grpo.config.rollout, grpo.config.optim, grpo.config.algorithm
    assert rollout.group_size == example.GROUP_SIZE and rollout.max_new_tokens == example.MAX_NEW_TOKENS
    assert rollout.temperature == 1 and rollout.dynamic_sampling is None and rollout.staleness == 0
    assert optim.micro_batch_size == example.MICRO_BATCH_SIZE
    assert (optim.updates_per_batch, optim.epochs_per_batch) == (1, 1)
    loss = registry.build("loss", algorithm.loss)
    assert loss == ClippedPolicyLoss(clip_low=example.CLIP, clip_high=example.CLIP, average="tokens")
    assert registry.build("advantage", algorithm.advantage) == GroupAdvantage(baseline="mean", scale="std")
    assert algorithm.kl is None and algorithm.entropy == 0 and not algorithm.modifiers and not algorithm.auxiliary


def test_the_learning_rate_is_the_librarys(example, plans):
    for stage, settings in zip(plans, (example.SFT, example.GRPO), strict=True):
        for steps in (stage.steps, 3, settings.warmup_steps):
            rates = [example.learning_rate(settings, step, steps) for step in range(steps)]
            assert rates == pytest.approx([learning_rate(stage.config.optim, step, steps) for step in range(steps)])


def test_the_optimizer_is_the_librarys(example, plans):
    """Weights after three steps along the same gradients, those of a length above 1 scaled down."""
    settings, optim = example.SFT, plans[0].config.optim
    torch.manual_seed(0)
    ours = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5)).double()
    theirs = copy.deepcopy(ours)
    gradients = [[scale * torch.randn_like(p) for p in ours.parameters()] for scale in (0.01, 1.0, 10.0)]

    given = iter(gradients)

    def backward(model, tasks):
        for parameter, gradient in zip(model.parameters(), next(given), strict=True):
            parameter.grad = gradient.clone()
        return 0.0

    example.run_stage(backward, ours, list(range(40)), settings, 3)
    optimizer = registry.build("optimizer", optim.optimizer)(theirs.parameters())
    for step, these in enumerate(gradients):
        for parameter, gradient in zip(theirs.parameters(), these, strict=True):
            parameter.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), optim.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(optim, step, 3)
        optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-9)


def test_an_epoch_has_every_task_once(example):
    drawn = []
    nothing = torch.nn.Linear(1, 1)
    settings = copy.copy(example.SFT)
    settings.prompts_per_step = 5
    example.run_stage(lambda model, tasks: drawn.extend(tasks) or 0.0, nothing, list(range(15)), settings, 6)
    assert sorted(drawn[:15]) == sorted(drawn[15:]) == list(range(15)) and drawn[:15] != drawn[15:]


def test_the_tasks_are_the_quickstarts(example):
    train, held_out = example.arithmetic(2000, "train"), example.arithmetic(256, "eval")
    assert len({task.prompt for task in train + held_out}) == 2256
    assert train[:200] == example.arithmetic(200, "train")  # the first tasks, whatever the count
    for task in arithmetic(count=50, digits=[3]):
        question = task.prompt[0]["content"]
        a, b = map(int, re.findall(r"\d+", question))
        assert f"{example.worked_columns(a, b)} #### {a + b}" == task.demonstration
    for task in train[:50]:
        a, b = map(int, re.findall(r"\d+", task.prompt))
        assert task == (f"{a}+{b}=?", str(a + b), f"{example.worked_columns(a, b)} #### {a + b}")
        assert all(100 <= number < 1000 for number in (a, b))
        assert example.verify(task, task.demonstration) == 1


@pytest.mark.parametrize(
    "completion", ["7+5+0=12 #### 12", "#### 12", "#### 13", "12", "", "#### 12 #### 13", "#### 112", "#### 121"]
)
def test_the_reward_of_these_completions_is_the_math_verifiers_score(example, completion):
    verifier = registry.build("verifier", ComponentSpec("math"))
    verdict = verifier.verify(Task(id="a", prompt="7+5=?", answer="12"), completion)
    assert example.verify(example.Task("7+5=?", "12", ""), completion) == verdict.score


def test_the_model_is_the_quickstarts(example, plans):
    theirs = load_policy(plans[1].config.model, seed=0).model
    ours = example.build_model()
    own = ours.config.to_dict()
    # The library's tokenizer has two special tokens more.
    differs = {"vocab_size", "eos_token_id", "dtype", "architectures", "_name_or_path"}
    assert {k: v for k, v in theirs.config.to_dict().items() if own.get(k) != v and k not in differs} == {}
    assert sum(p.numel() for p in theirs.parameters()) - sum(p.numel() for p in ours.parameters()) == 2 * 96
    assert sum(p.numel() for p in ours.parameters()) // 1000 == 371  # as build_model says


@pytest.mark.parametrize("values", ["0 or 1", "any number"])
def test_the_advantage_is_the_librarys(example, values):
    random = np.random.default_rng(0)
    rewards = random.integers(2, size=(64, 8)).astype(float) if values == "0 or 1" else random.normal(size=(64, 8))
    rewards[:4] = 0.3  # groups without spread
    theirs = group_advantage(rewards.ravel(), np.repeat(np.arange(64), 8))
    ours = example.group_advantage(torch.from_numpy(rewards)).flatten()
    assert ours.numpy() == pytest.approx(theirs, abs=1e-6)


def test_groups_without_spread_have_no_advantage_at_all(example):
    """Exactly, in float32: `nonzero` finds the rows to train."""
    for size in range(2, 17):
        assert not example.group_advantage(torch.tensor([[0.0] * size, [1.0] * size])).any()


def test_the_loss_and_its_gradient_are_the_librarys(example):
    torch.manual_seed(0)
    rows, length = 12, 9
    trained = torch.rand(rows, length) < 0.7
    trained[3] = False
    behaviour = torch.randn(rows, length, dtype=torch.float64) * trained
    # Ratios on both sides of both bounds, and 1.
    ours = (behaviour + 0.4 * torch.randn(rows, length, dtype=torch.float64) * trained).requires_grad_()
    advantage = torch.randn(rows, dtype=torch.float64)
    advantage[5] = 0.0
    tokens = int(trained.sum()) + 17  # those of other micro-batches
    batch = example.Batch(trained.long(), trained.long(), trained, behaviour)
    loss = example.clipped_policy_loss(ours, batch, advantage, tokens)
    loss.backward()

    theirs = ours.detach().clone().requires_grad_()
    sequence = torch.arange(rows)[:, None].expand(rows, length)[trained]
    flat = TokenBatch(
        sequence=sequence,
        sequences=rows,
        weight=torch.ones(len(sequence), dtype=torch.float64),
        advantage=advantage[sequence],
        proximal_logprobs=behaviour[trained],
        behaviour_logprobs=behaviour[trained],
        statistics={("logprobs", CURRENT): theirs[trained]},
    )
    over = Denominators(tokens=tokens, sequences=rows, constant=1)
    expected = ClippedPolicyLoss(average="tokens")(flat, over).value
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-9)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-9)
    assert 0 < int((ours.grad[trained] == 0).sum()) < int(trained.sum())  # the clip binds at some tokens


def gradient(model):
    """All gradients in one vector; they are cleared."""
    result = torch.cat([p.grad.flatten().clone() for p in model.parameters()])
    model.zero_grad()
    return result


@pytest.mark.parametrize("size", [1, 3, 5])
def test_the_gradient_does_not_depend_on_the_micro_batches(example, batch, size, monkeypatch):
    model, rollouts = batch
    advantage = torch.randn(12, dtype=torch.float64)
    advantage[[2, 6, 10]] = 0.0  # groups without signal are not computed, but their tokens are counted
    tokens = int(rollouts.trained.sum())
    example.clipped_policy_loss(example.token_logprobs(model, rollouts), rollouts, advantage, tokens).backward()
    whole = gradient(model)
    monkeypatch.setattr(example, "MICRO_BATCH_SIZE", size)
    example.add_policy_gradient(model, rollouts, advantage)
    torch.testing.assert_close(gradient(model), whole, rtol=0, atol=1e-9)
    assert whole.abs().max() > 1e-4


def test_a_batch_without_signal_has_no_gradient(example, batch):
    model, rollouts = batch
    example.add_policy_gradient(model, rollouts, torch.zeros(12))
    assert all(p.grad is None for p in model.parameters())


def test_log_probs_at_sampling_are_those_of_training(example, batch):
    """Prompts of different lengths are padded on the left, and the cache has the keys of earlier tokens."""
    model, rollouts = batch
    with torch.no_grad():
        logprobs = example.token_logprobs(model, rollouts)
    torch.testing.assert_close(logprobs, rollouts.behaviour_logprobs, rtol=0, atol=1e-9)
    assert (logprobs[rollouts.trained] < 0).all() and not logprobs[~rollouts.trained].any()


def test_a_completion_ends_with_its_end_token_or_its_length(example, batch):
    _, rollouts = batch
    lengths = rollouts.trained.sum(-1)
    ends = (rollouts.token_ids == example.END) & rollouts.trained
    assert (ends.sum(-1) <= 1).all() and (lengths <= example.MAX_NEW_TOKENS).all() and len(set(lengths.tolist())) > 2
    for row, trained, mask in zip(rollouts.token_ids, rollouts.trained, rollouts.attention_mask, strict=True):
        completion = row[trained]
        assert completion[-1] == example.END or len(completion) == example.MAX_NEW_TOKENS
        start, stop = mask.nonzero()[[0, -1], 0].tolist()
        assert mask[start : stop + 1].all() and row[start] == example.USER
        assert trained.nonzero()[-1] == stop and (row[stop + 1 :] == example.PAD).all()


def test_greedy_takes_the_likeliest_token(example, batch):
    model, _ = batch
    rollouts = example.sample(model, [example.Task("1+2=?", "", "")], greedy=True)
    with torch.no_grad():
        logits = model(rollouts.token_ids).logits[:, :-1]
    assert torch.equal(logits.argmax(-1)[rollouts.trained[:, 1:]], rollouts.token_ids[rollouts.trained])
    assert torch.equal(
        example.sample(model, [example.Task("1+2=?", "", "")], greedy=True).token_ids, rollouts.token_ids
    )


def test_the_numbers_of_the_page_are_those_of_the_functions(example, page):
    (written,) = re.findall(r"rewards 1, 0, 0, 0, 0, 0, 0, 0 .*?advantages \+([\d.]+).*?-([\d.]+)", page, re.DOTALL)
    advantage = example.group_advantage(torch.tensor([[1.0] + [0.0] * 7]))[0]
    assert [f"{advantage[0]:.2f}", f"{-advantage[1]:.2f}"] == list(written)


def names_of(path):
    """The names that the file defines, in lower case: of functions, parameters, variables and fields."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.keyword(arg=str(name)):
                found.add(name)
    return {name.lower() for name in found}


def test_its_names_are_spelt_as_in_the_pages(root, path):
    glossary, shapes, config = (
        (root / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("glossary", "shapes", "config")
    )
    names = names_of(path)
    fields = set(re.findall(r"^\| `(\w+)` \|", shapes, re.MULTILINE))
    options = {name.rpartition(".")[2] for name in re.findall(r"^\| `([\w.]+)` \|", config, re.MULTILINE)}
    terms = re.findall(r"^\| ([\w -]+) \|", glossary, re.MULTILINE)
    terms = {re.sub(r"\W", "_", term.replace("log-prob", "logprob")) for term in terms}
    assert {"token_ids", "behaviour_logprobs", "advantage"} <= names & fields
    assert {"prompts_per_step", "group_size", "max_new_tokens", "micro_batch_size", "warmup_steps"} <= names & options
    assert {"task", "batch", "verify"} <= names
    assert len(fields) > 20 and len(options) > 100 and len(terms) > 40

    def squashed(name):
        return name.lower().replace("_", "").removesuffix("s")

    known = {squashed(name): name for name in fields | options | terms}
    other = {name: known[squashed(name)] for name in names if squashed(name) in known}
    assert all(name.removesuffix("s") == right.removesuffix("s") for name, right in other.items()), other
    rows = [line.split("|") for line in glossary.splitlines() if line.count("|") == 4]
    elsewhere = {name for row in rows for name in re.findall(r"`(\w+)`", row[3])}
    assert len(elsewhere) > 10 and names & elsewhere == {"grpo"}  # which is also the name of an average in TRL
    assert not re.search(r"behavior|log-?probabilit|\blogprobs? of", path.read_text(encoding="utf-8"))


def test_the_command_prints_what_it_measured(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--seed", "3", "--sft-steps", "2", "--steps", "0"])
    runpy.run_path(str(path), run_name="__main__")
    printed = r"held-out accuracy, greedy: 0\.\d{3} after sft, 0\.\d{3} after grpo; \d+ CPU seconds\n"
    assert re.fullmatch(printed, capsys.readouterr().out)


def test_a_step_of_each_stage_trains(example, monkeypatch):
    torch.manual_seed(0)
    model = example.build_model()
    tasks = example.arithmetic(4, "train")
    monkeypatch.setattr(example, "verify", lambda task, text: float(len(text) % 2))
    assert example.sft(model, tasks) > 1 and gradient(model).abs().max() > 0
    assert 0 < example.grpo(model, tasks) < 1 and gradient(model).abs().max() > 0


def test_the_figures_of_the_page_are_in_the_band(page, band):
    rows = re.findall(r"^\| \d \| ([\d.]+) \| ([\d.]+) \| \d+:\d+ \|$", page, re.MULTILINE)
    assert rows and all(band[0] <= float(after_grpo) <= band[1] for _, after_grpo in rows)
    assert f"between {band[0]} and {band[1]}" in page


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [0])
def test_it_learns_what_the_quickstart_learns(example, band, seed):
    after_sft, after_grpo = example.train(seed)
    assert after_sft < 0.6
    assert band[0] <= after_grpo <= band[1]
