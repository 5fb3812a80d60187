"""Prompts encoded in batches: the ids of one-by-one encoding, each prompt once, in little memory."""

import gc
import tracemalloc

import numpy as np
import pytest

from rlvr.data import Prompts, Template
from rlvr.data import prompts as module
from rlvr.distributed.world import World
from rlvr.errors import DataError
from rlvr.policy.scratch import ScratchConfig, build_tokenizer
from rlvr.records import Task
from rlvr.run.run_tasks import encoded_lengths

TEXTS = [
    "2+2=",
    " leading and trailing \n",
    "e\u0301 \u00e9 \u200d \U0001f469\u200d\U0001f680 \ufb01 \u202e \x00 \t",
    "\u65e5\u672c\u8a9e {prompt} {x} <bos> <a> <unk>",
    "<bos>begins",
    "x" * 700,
    "2+2=",
]
CHATS = [
    [{"role": "system", "content": "S"}, {"role": "user", "content": text}]
    if n % 2
    else [{"role": "user", "content": text}]
    for n, text in enumerate(TEXTS)
]
CONTINUED = [[*chat, {"role": "assistant", "content": "So"}] for chat in CHATS]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
TEMPLATES = [
    None,
    "Q: {prompt}\nA:",
    {"user": "Q {prompt}"},
    {"system": "Be {brief}"},
    {"system": "T", "user": "Q {prompt}", "options": {"style": "no", "tools": TOOLS}},
    {"text": "Q: {prompt}\nA:"},
]


def one_by_one(prompt, tokenizer, template):
    """The ids as they are without batches: each prompt rendered and tokenised by a call of its own."""
    around = Template.parse(template)
    prompt = around.apply(prompt)
    if isinstance(prompt, str):
        bare, bos = tokenizer(prompt, add_special_tokens=False)["input_ids"], tokenizer.bos_token_id
        begins = bos is not None and tokenizer(prompt)["input_ids"][:1] == [bos]
        return [bos, *bare] if begins and bare[:1] != [bos] else bare
    continued = prompt[-1]["role"] == "assistant"
    how = {"add_generation_prompt": not continued, "continue_final_message": continued, "return_dict": False}
    return tokenizer.apply_chat_template(prompt, tokenize=True, **{**around.options, **how})


@pytest.fixture(scope="module")
def tokenizers(make_tokenizer):
    """Character and byte-level BPE tokenizers, with and without tokens that they add by themselves."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = ["<bos>", "<end>", "<s>", "<u>", "<a>"]
    inner.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=400, special_tokens=special))
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    chat = (
        "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
        "<{{ m.role[0] }}>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    bpe = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<bos>", eos_token="<end>", pad_token="<end>", chat_template=chat
    )
    return [bpe, make_tokenizer(), make_tokenizer(adds_bos=True, adds_eos=True), make_tokenizer(bos=False)]


@pytest.mark.parametrize("template", TEMPLATES)
def test_ids_are_those_of_one_by_one_encoding(tokenizers, template, monkeypatch):
    monkeypatch.setattr(module, "BATCH_PROMPTS", 5)  # parts that mix texts, chats and continued chats
    continued = [] if isinstance(template, dict) and "text" in template else CONTINUED
    tasks = [Task(str(n), prompt) for n, prompt in enumerate([*TEXTS, *CHATS, *continued])]
    for tokenizer in tokenizers:
        prompts = Prompts(tokenizer).under(template)
        wanted = [one_by_one(task.prompt, tokenizer, template) for task in tasks]
        assert prompts.lengths(tasks).tolist() == [len(ids) for ids in wanted]
        for task, ids in zip(tasks, wanted, strict=True):
            assert list(prompts(task)) == list(ids)
            assert list(Prompts(tokenizer, template)(task)) == list(ids)


def test_a_prompt_is_encoded_once_for_all_stages_and_evaluations(make_tokenizer, monkeypatch):
    tokenizer = make_tokenizer(bos=False)  # with one, a text of each batch is encoded again to see whether it is added
    encoded = []
    call = type(tokenizer).__call__

    def counting(self, text, **options):
        encoded.extend(text if isinstance(text, list) else [text])
        return call(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", counting)
    prompts = Prompts(tokenizer)
    train = [Task(str(n), f"{n % 30}=?") for n in range(40)]
    held_out = [Task(f"e{n}", f"{n}=?") for n in range(25, 35)]
    prompts.lengths(train)
    prompts.under(None).lengths(held_out)
    prompts.lengths(train)
    for task in [*train, *held_out]:
        prompts(task)
    assert sorted(encoded) == sorted(f"{n}=?" for n in range(35))
    prompts.under("Q {prompt}").lengths(held_out)
    assert len(encoded) == 45


def test_memory_is_four_bytes_a_token_and_28_a_prompt(tokenizer):
    prompts = Prompts(tokenizer)
    tasks = [Task(str(n), f"{n:05d}" * 40) for n in range(3000)]
    prompts.lengths([Task("first", "1")])  # what the first call imports and caches
    prompts._blocks.clear()
    tracemalloc.start()
    try:
        assert set(prompts.lengths(tasks).tolist()) == {200}
        gc.collect()
        allocated, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert allocated < 4.2 * 3000 * 200  # no slack that an array keeps after it has grown
    (block,) = prompts._blocks
    kept = sum(values.nbytes for values in vars(block).values())
    assert kept == 3000 * (200 * 4 + 28)
    assert kept < 4.5 * 3000 * 200
    assert block.ids.dtype == np.int32


def test_tasks_that_are_made_or_rewritten_are_encoded_when_asked_for(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "RECENT", 3)
    prompts = Prompts(tokenizer)
    prompts.lengths([Task("t", "1+1")])
    for text in ["1+1", "2+2", "3+3", "4+4", "5+5", "2+2"]:
        assert tokenizer.decode(prompts(Task("t", text))) == text
    assert len(prompts._recent) == 3


def test_no_tasks_have_no_lengths(tokenizer):
    assert Prompts(tokenizer).lengths([]).tolist() == []
    assert Prompts(tokenizer).demonstration_lengths([]).tolist() == []


def test_a_prompt_that_cannot_be_rendered_is_named_among_others(tokenizer):
    tokenizer.chat_template = "{% if messages[0].content == '3' %}{{ raise_exception('no threes') }}{% endif %}x"
    tasks = [Task(f"t{n}", [{"role": "user", "content": str(n)}]) for n in range(5)]
    with pytest.raises(DataError, match=r"task 't3': .*no threes"):
        Prompts(tokenizer).lengths(tasks)
    with pytest.raises(DataError, match=r"task 'empty': the prompt has no tokens"):
        Prompts(tokenizer).lengths([Task("full", "1"), Task("empty", "")])


def test_lengths_of_demonstrations_count_the_end(tokenizer):
    tasks = [Task("a", "1", demonstration="12"), Task("b", "1"), Task("c", "1", demonstration="123<end>")]
    assert Prompts(tokenizer).demonstration_lengths(tasks).tolist() == [3, 0, 4]


def test_encoding_that_takes_long_is_reported(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "PROGRESS_SECONDS", -1.0)
    monkeypatch.setattr(module, "BATCH_PROMPTS", 2)
    output = []
    Prompts(tokenizer, report=output.append).lengths([Task(str(n), str(n)) for n in range(5)])
    assert output == [
        "encoded 2 of 5 prompts",
        "encoded 4 of 5 prompts",
        "encoded 5 prompts (5 tokens) in 0 s",
    ]


def test_only_the_first_rank_encodes(tokenizer):
    tasks = [Task("a", "12", demonstration="1"), Task("b", "1")]

    class Other(World):
        def broadcast(self, value, what, deadline=0.0):
            return value

    prompts = Prompts(tokenizer)
    encoded_lengths(prompts, Other(rank=1, size=2), tasks, demonstrations=True)
    assert prompts._blocks == []
    lengths, shown = encoded_lengths(prompts, Other(rank=0, size=2), tasks, demonstrations=True)
    assert (lengths.tolist(), shown.tolist()) == ([2, 1], [2, 0])


def test_text_without_a_token_is_warned_of(caplog):
    tokenizer = build_tokenizer(ScratchConfig(alphabet="0123456789+=\u00e9"))
    tasks = [Task("known", "1+1="), Task("odd", "a1+b1=\u00e9\u00e8"), Task("twice", "\u00e8\u00e8")]
    prompts = Prompts(tokenizer)
    prompts.lengths(tasks[:1])
    assert not caplog.records
    prompts.lengths(tasks)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("2 of 2 prompts have text that the tokenizer has no token for, the first is task 'odd' ")
    assert "('a', 'b', '\u00e8')" in said and "<unk>" in said and "model.scratch.alphabet" in said
    prompts.lengths(tasks)
    assert len(caplog.records) == 1
