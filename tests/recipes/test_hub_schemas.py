"""Every recipe and every benchmark starts: built unshortened against the public schema of what it names, without a
download.

The model is a tiny one of the same kind, with the context, the special tokens and a chat template of the form that the
recipe's model has; data sets and files are the example rows of hub_schemas.json with the types of their columns. The
real trainer opens the stages on them: rows, templates, samplers, lengths and verifiers are the library's own.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import string
from contextlib import contextmanager
from pathlib import Path

import datasets
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from rlvr.config import Config, ScratchConfig
from rlvr.config.config_loading import load_config, recipe_files
from rlvr.core.specs import ComponentSpec
from rlvr.data import Template, load_tasks
from rlvr.data.templates import render_prompts
from rlvr.errors import RlvrError
from rlvr.evaluation.benchmarks import benchmark_tasks, benchmarks, with_benchmark
from rlvr.evaluation.verifier_benchmarks import read_row_sets, verifier_benchmarks
from rlvr.planner.meta_model import shipped_sizes
from rlvr.policy.loading import override_config
from rlvr.policy.scratch import build_tokenizer
from rlvr.recipes.__main__ import main
from rlvr.recipes.hub_schemas import hub_schemas, named_data, schema_lines
from rlvr.recipes.papers import find_paper, read_papers
from rlvr.recipes.stand_ins import with_stand_ins
from rlvr.trainer import GRPOTrainer
from rlvr.verifiers import VerifierPool, as_verifier

SLUGS = sorted(recipe_files())
SCHEMAS = hub_schemas()
CANNOT_START: dict[str, str] = {}
"""Recipe -> the reason why it does not start, in words: a strict xfail, which fails where the recipe starts."""


def features(columns):
    """The features of a data set whose columns have these types: a list is of one type, a mapping a struct."""
    if isinstance(columns, str):
        return datasets.Value(columns)
    if isinstance(columns, list):
        return datasets.List(features(columns[0]))
    return {name: features(kind) for name, kind in columns.items()}


def as_dataset(schema):
    return datasets.Dataset.from_list(schema["rows"], features=datasets.Features(features(schema["columns"])))


def from_hub(name, config=None, split=None, revision=None):
    """The rows of a set of hub_schemas.json, as `datasets.load_dataset` gives them; it refuses what the hub would."""
    configs = SCHEMAS["data"][name]["configs"]
    if config is None:
        # The hub's client takes the only configuration, or the one that is called `default`.
        if len(configs) > 1 and "default" not in configs:
            raise ValueError(f"Config name is missing. Please pick one among {list(configs)}")
        config = "default" if "default" in configs else next(iter(configs))
    if config not in configs:
        raise ValueError(f"BuilderConfig {config!r} not found. Available: {list(configs)}")
    if split.partition("[")[0] not in configs[config]:
        raise ValueError(f"Unknown split {split!r}. Should be one of {configs[config]}")
    return as_dataset(SCHEMAS["data"][name])


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The data sets of the hub and the files of a user, as the schemas have them."""
    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    monkeypatch.chdir(tmp_path)
    for name, schema in SCHEMAS["files"].items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            as_dataset(schema).to_parquet(path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in schema["rows"]))


def tokenizer_of(described, context):
    """A tokenizer of characters with the special tokens and the chat template of a described one."""
    alphabet = string.printable[:95] + "\n\t"
    tokenizer = build_tokenizer(ScratchConfig(context=context, alphabet=alphabet, words=described["tokens"]))
    tokenizer.chat_template = described["template"]
    tokenizer.eos_token = described["eos"]
    if "bos" in described:
        tokenizer.bos_token = described["bos"]
    return tokenizer


def tiny_model(paper):
    """A model of the recipe's kind without its size, with the context that the recipe gives it."""
    schema = SCHEMAS["models"][paper.config.model.path]
    tokenizer = tokenizer_of(SCHEMAS["tokenizers"][schema["tokenizer"]], schema["context"])
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": len(tokenizer)}
    config = AutoConfig.for_model(schema["type"], max_position_embeddings=schema["context"], **sizes, **heads)
    override_config(config, paper.config.model.override_config)
    return AutoModelForCausalLM.from_config(config), tokenizer


@contextmanager
def opened(paper):
    """The recipe's trainer with its stages open, as it is but for weights, engine, backend, and what judges at an
    endpoint or as a frozen model. In the current folder."""
    tree = with_stand_ins(paper.tree, Path("stand-ins"), "http://127.0.0.1:9/v1")
    model, tokenizer = tiny_model(paper)
    # What is loaded from the hub, and where it is computed.
    for key in ("path", "override_config"):
        tree["model"].pop(key, None)
    tree["model"] |= {"device": "cpu", "dtype": "float32"}
    tree["rollout"]["engine"] = "hf"
    tree |= {"distributed": {"backend": "plain"}, "logging": {"console": "off", "rollouts": 0}}
    tree["run"]["dir"] = "runs"
    with GRPOTrainer(model=model, tokenizer=tokenizer, config=tree) as trainer:
        yield trainer


def schema_of(spec):
    """The schema of the data set that `data.train` writes; of a source that makes its tasks, what it makes."""
    if isinstance(spec, list):
        (spec,) = spec
    if isinstance(spec, dict) and not {"data", "path"} & set(spec):
        made = load_tasks(spec)
        return {"rows": made, "right": ["It is {answer}."] * len(made)}
    if isinstance(spec, dict):
        spec = spec.get("data", spec.get("path"))
    if spec in SCHEMAS["files"]:
        return SCHEMAS["files"][spec]
    return SCHEMAS["data"]["/".join(spec.partition(":")[0].split("/")[:2])]


@pytest.mark.parametrize(
    "slug",
    [
        pytest.param(slug, marks=[pytest.mark.xfail(reason=CANNOT_START[slug], strict=True)])
        if slug in CANNOT_START
        else slug
        for slug in SLUGS
    ],
)
def test_a_recipe_starts(slug, hub):
    paper = find_paper(slug)
    check_recipe(paper)


FAULTS = {
    "the context of the model is too short": (
        "acereason-nemotron-1-1",
        {"model": {"override_config": {}}},
        "rollout.max_new_tokens is 8192, and a context of 4096 tokens",
    ),
    "two stages that do the same": (
        "simplerl-zoo",
        {"stages": [{"kind": "grpo", "name": "first", "steps": 10}, {"kind": "grpo", "name": "second", "steps": 20}]},
        "stage 1 does what an earlier stage does",
    ),
    "a text prompt for a chat model": ("e1", {"data": {"template": "{prompt}"}}, "a chat model is asked in chats"),
    "a chat for a model without a chat template": (
        "demystifying-long-cot",
        {"data": {"template": {"user": "{prompt}"}}},
        "the tokenizer has no chat template: use an instruction-tuned model, or make it text with data.template",
    ),
    "a template with the braces of str.format": ("psr", {"data": {"template": {"user": "{prompt} {{}}"}}}, "braces"),
    "`<think>` twice": ("practical-two-stage-recipe", {"data": {"template": "chat"}}, "opens it again"),
    "a column that the data set lacks": (
        "laser",
        {"data": {"fields": {"prompt": "question", "answer": "answer"}}},
        "there is no field 'answer', which the field map gives for 'answer' (the row has question, final_answer",
    ),
    "a configuration that is not chosen": ("scalable-irl", {"data": {"train": "openai/gsm8k"}}, "'socratic'"),
    "a split that the data set lacks": (
        "vmr",
        {"data": {"train": {"name": "preferences", "data": "HuggingFaceH4/ultrafeedback_binarized"}}},
        "(config None, split train) it cannot be loaded",
    ),
    "a gold that is no label": (
        "rm-r1",
        {"verifier": {"name": "label", "labels": ["A", "B"]}},
        "the answer 'model_a' is none of the labels",
    ),
}
"""Faults that the test must find: each a change of a recipe, and a part of what is said about it."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_recipe_is_found(fault, hub):
    slug, change, message = FAULTS[fault]
    paper = find_paper(slug)
    tree = dict(paper.tree)
    for section, values in change.items():
        tree[section] = values if section in ("stages", "verifier") else {**tree[section], **values}
    changed = paper.model_copy(update={"tree": tree})
    with pytest.raises((AssertionError, RlvrError), match=re.escape(message)):
        check_recipe(changed)


def check_recipe(paper):
    with opened(paper) as trainer:
        for stage in trainer.stages:
            check_stage(stage, trainer, SCHEMAS["models"][paper.config.model.path])
        effects = [effect_of(stage) for stage in trainer.stages]
    for number, effect in enumerate(effects):
        assert effect not in effects[:number], f"stage {number} does what an earlier stage does"


def check_stage(stage, trainer, model):
    schema = schema_of(stage.config.data.train)
    tasks = list(stage.pool)
    train = stage.config.data.train
    orders = 2 if isinstance(train, dict) and train.get("both_orders") else 1
    # Fields resolve: every row is a task, or one in either order, and none was dropped.
    assert len(tasks) == orders * len(schema["rows"])
    assert stage.left_out == 0
    template = Template.parse(stage.config.data.template)
    for task in tasks:
        text = trainer.policy.tokenizer.decode(stage.context.prompt(task))
        assert not model["tuned"] or not isinstance(template.apply(task.prompt), str), "a chat model is asked in chats"
        assert "{{" not in text and "{prompt}" not in text, f"braces of a template in {text}"
        assert "<unk>" not in text
        # A prompt that ends in `<think>`, for example.
        opening = re.search(r"<[^<>]+>\s*\Z", text)
        if opening is not None and task.demonstration:
            assert not task.demonstration.startswith(opening[0].strip()), f"the demonstration opens it again: {text}"
        if stage.config.rollout.plan.name == "turns":
            assert stage.context.prompt.reply(task, "Again.", "user", trainer.policy.tokenizer.eos_token_id)
    check_lengths(stage, schema.get("longest", {}), model["context"])
    # A judge or a reward model is not asked: a stand-in would say anything.
    if stage.verifies and not asks_a_model(as_verifier(stage.config.verifier)):
        right = [response for response in schema["right"] for _ in range(orders)]
        check_golds(tasks, right, stage.config.verifier)


def asks_a_model(verifier):
    """Of a combination: one of its parts does."""
    return verifier.needs.remote or any(asks_a_model(part) for part in getattr(verifier, "verifiers", {}).values())


def check_lengths(stage, longest, context):
    """The longest prompt of the data set leaves room for a whole response, and for its demonstration."""
    data = stage.config.data
    tasks = list(stage.pool)
    prompts, shown = stage.context.lengths(tasks, demonstrations=True)
    prompt = max(prompts.max(), min(longest.get("prompt", 0), data.max_prompt_tokens or context))
    limit = stage.context.policy.context
    if stage.samples:
        wanted = stage.config.rollout.max_new_tokens
        assert prompt + wanted <= limit, f"prompts of {prompt} and responses of {wanted} tokens in {limit}"
    if shown.any():
        sequence = max(longest.get("sequence", 0), prompt + longest.get("demonstration", shown.max()))
        # Demonstrations that are too long are left out where the recipe says so.
        assert sequence <= limit or data.skip_long_prompts, f"demonstrations of up to {sequence} tokens in {limit}"


def check_golds(tasks, right, default):
    """The verifier reads each gold, and a right response is right."""
    with VerifierPool(workers=1) as pool:
        for task, response in zip(tasks, right, strict=True):
            verifier = as_verifier(task.verifier or default)
            assert verifier.check_task(task) is None
            assert response is not None, f"hub_schemas.json has no right response to {task.named}"
            text = response.replace("{answer}", str(task.answer))
            if default is not None and default.options.get("think_opened_by_prompt"):
                text = f"Let me see. </think> {text}"
            (verdict,) = pool.verify_many(verifier, [(task, text)])
            assert verdict.status.value == "correct", f"{text}: {verdict}"


ASKED = {
    "math-500": "What is $3^2 + 4^2$?\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "humaneval": 'in a markdown code block:\n```\ndef add_one(x: int) -> int:\n    """Return x + 1."""\n```\n',
    "humaneval-plus": 'block:\n```\ndef twice(x: int) -> int:\n    """Return 2 * x."""\n```\n',
    "mbpp": "here is your task: Write a python function to square a number. Your code should pass these tests:\n\n"
    "assert square(3) == 9\nassert square(0) == 0\nassert square(-2) == 4\n",
    "mbpp-plus": '```\n"""\nWrite a function to multiply a number by three.\nassert thrice(2) == 6\n"""\n```\n',
    "ifeval": "<|im_start|>user\nTell me of a river. Do not use any commas.<|im_end|>",
    "gpqa": "\n\nWhich of these gases is noble?\n\nA) ",
}
"""A part of the prompt of the first row, written out by hand from the source that the benchmark names."""


@pytest.mark.parametrize("name", benchmarks())
def test_a_benchmark_asks_as_published_and_judges_right_and_wrong_responses(name, hub):
    benchmark = benchmarks()[name]
    tasks = benchmark_tasks(benchmark)
    schema = schema_of(benchmark.data)
    assert [task.id for task in tasks] == [f"{name}/0", f"{name}/1"]
    config = load_config(with_benchmark(Config().dump(), benchmark))
    assert config.evaluation.max_new_tokens >= 512
    tokenizer = tokenizer_of(SCHEMAS["tokenizers"]["qwen2.5"], 4096)
    prompts = [tokenizer.decode(ids) for ids in render_prompts(tasks, tokenizer, config.data.template)]
    assert ASKED.get(name, "Please reason step by step") in prompts[0]
    assert prompts[0].endswith(benchmark.begin or "<|im_start|>assistant\n")
    assert "<unk>" not in "".join(prompts) and "{{" not in "".join(prompts)
    right = [text.replace("{letter}", letter_of(task)) for task, text in zip(tasks, schema["right"], strict=True)]
    verifier = ComponentSpec(benchmark.verifier)
    if verifier.name == "code" and shutil.which("bwrap") is None:
        # The isolation has tests of its own.
        verifier = ComponentSpec("code", {"tier": "none", "unsafe": True})
    tasks = [dataclasses.replace(task, verifier=None) for task in tasks]
    check_golds(tasks, right, verifier)
    if name not in ("ifeval", "gpqa"):  # a response to one prompt may follow the other, or name the same letter
        with VerifierPool(workers=1) as pool:
            (verdict,) = pool.verify_many(as_verifier(verifier), [(tasks[0], right[1])])
        assert verdict.score == 0.0


VERIFIED = {
    "reward-bench": (["alpacaeval-easy", "hep-python"], ("The Danube.", "Mont Blanc.")),
    "reward-bench-2": (["Math", "Ties"], ("36", "35", "63", "66")),
    "rm-bench": (["math", "chat"], ("7", "The sum of 3 and 4 is 7.", "The sum of 3 and 4 is **7**.", "8")),
    "judge-bench": (["livebench-math", "mmlu-pro-law"] * 2, ("It is 56.", "It is 54.")),
    "processbench": (
        [source for source in ("gsm8k", "math", "olympiadbench", "omnimath") for _ in range(2)],
        ("There are 3 * 4 = 12 apples.\n\nShe eats 2, so 12 - 2 = 9 are left.\n\nThe answer is 9.",),
    ),
}
"""Set of labelled rows -> the sources of its rows, and the first responses of the first row."""


@pytest.mark.parametrize("name", verifier_benchmarks())
def test_a_set_that_verifiers_are_evaluated_on_is_read(name, hub):
    benchmark = verifier_benchmarks()[name]
    (row_set,) = read_row_sets(benchmark.rows, [name])
    sources, responses = VERIFIED[name]
    assert [row.task.source for row in row_set.rows] == sources
    assert row_set.rows[0].responses[: len(responses)] == responses
    assert len({row.task.id for row in row_set.rows}) == len(sources)
    if name == "processbench":
        assert [row.first_wrong for row in row_set.rows[:2]] == [1, -1]
    if name == "rm-bench":
        assert benchmark.styled and len(row_set.rows[0].chosen) == len(row_set.rows[0].rejected) == 3


def letter_of(task):
    """The letter under which the right option of a question stands in its prompt."""
    if "order" not in task.info:
        return ""
    letter = "ABCD"[task.info["order"].index(0)]
    assert f"\n{letter}) {task.info['options'][0]}" in task.prompt[0]["content"]
    return letter


def effect_of(stage):
    """The effect of a stage: its configuration, with the length of responses that the context leaves."""
    config = stage.config.dump()
    config["rollout"]["max_new_tokens"] = min(config["rollout"]["max_new_tokens"], stage.longest_response)
    return stage.plan.kind, json.dumps(stage.plan.options, default=str, sort_keys=True), json.dumps(config, default=str)


@pytest.mark.parametrize("kind", ["data", "files"])
def test_a_schema_is_of_two_rows_that_have_its_columns_and_says_where_it_was_read(kind):
    for name, schema in SCHEMAS[kind].items():
        rows = as_dataset(schema).to_list()
        assert len(rows) == 2, name
        assert all(set(row) <= set(schema["columns"]) for row in schema["rows"]), name
        assert len(schema["right"]) == 2, name
        assert schema["source"], name
        if "longest" in schema:
            assert schema["longest"]["source"], name


def test_every_model_and_data_set_that_a_recipe_or_a_benchmark_names_has_a_schema_and_no_other():
    papers = read_papers()
    models = {paper.config.model.path for paper in papers}
    data = {name for paper in papers for name in named_data(paper.config)}
    written = [one.data for one in benchmarks().values()]
    written += [name for one in verifier_benchmarks().values() for name in one.data.values()]
    data |= {"/".join(name.partition(":")[0].split("/")[:2]) for name in written}
    assert models == set(SCHEMAS["models"])
    assert data == set(SCHEMAS["data"]) | set(SCHEMAS["files"])
    used = {model["tokenizer"] for model in SCHEMAS["models"].values()}
    assert used == set(SCHEMAS["tokenizers"])


def test_a_model_s_context_is_that_of_the_shapes_that_are_shipped():
    for name, schema in SCHEMAS["models"].items():
        shipped = shipped_sizes().get(name)
        assert schema["source"]
        assert shipped is not None or schema.get("unseen"), name
        if shipped is not None:
            assert (schema["context"], schema["type"]) == (shipped["max_position_embeddings"], shipped["model_type"])


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 5))])
def test_show_says_which_schemas_were_not_seen_and_which_files_a_user_makes(capsys, part):
    """Of every fifth recipe; the others are slow tests."""
    for paper in read_papers()[part::5]:
        assert main(["show", paper.slug]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert set(schema_lines(paper)) <= set(shown)
        for name in (paper.config.model.path, *named_data(paper.config)):
            schema = next(SCHEMAS[kind][name] for kind in ("models", "data", "files") if name in SCHEMAS[kind])
            assert any(line.startswith(f"unseen: {name}: ") for line in shown) == bool(schema.get("unseen")), name
            if name in SCHEMAS["files"]:
                where = next(n for n, line in enumerate(shown) if line.startswith("file: ") and name in line)
                assert schema["make"] in shown[where]
    assert not schema_lines(find_paper("psr"))
