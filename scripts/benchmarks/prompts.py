"""Measure rate and memory of encoding prompts: `rlvr.data.Prompts` beside the tokenizer called on batches of the same
texts.

    python scripts/benchmarks/prompts.py [--count 1000000] [--tokens 200] [--chat] [--out prompts.json]

The tokenizer is a byte-level BPE of 32,768 tokens, trained here on generated arithmetic and made-up words; prompts are
drawn from the same. The prompts are encoded in slices of 10,000. Before or after each slice (in turn) the tokenizer by
itself encodes a fifth of the slice's texts, in batches of the same size, and the result is dropped: `rate_ratio`
is over all slices. With `--chat` each prompt is a chat, and the tokenizer by itself gets the rendered texts, so that
the ratio includes the rendering. `bytes_a_token_rss` is the growth of resident memory from before the first slice,
where prompts and tokenizers are in memory already, to the end.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from result_file import result_file

from rlvr.data.prompts import BATCH_PROMPTS, Prompts
from rlvr.records import Task

VOCABULARY = 32_768
SLICE = 10_000
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]


def lexicon(size: int, generator: random.Random) -> list[str]:
    """Made-up words of two to four syllables."""
    onsets = [*"bcdfghklmnprstv", "st", "tr", "pl"]
    vowels = "aeiou"
    codas = ["", *"nrstl"]

    def word() -> str:
        parts = (
            generator.choice(onsets) + generator.choice(vowels) + generator.choice(codas)
            for _ in range(generator.randint(2, 4))
        )
        return "".join(parts)

    return [word() for _ in range(size)]


def text(words: list[str], count: int, generator: random.Random) -> str:
    """A sentence of `count` words, every tenth of them a sum."""
    chosen = generator.choices(words, k=count)
    for number in range(0, count, 10):
        chosen[number] = f"{generator.randint(0, 9999)} + {generator.randint(0, 9999)} ="
    return " ".join(chosen)


def build_tokenizer(words: list[str], generator: random.Random) -> Any:
    """The BPE tokenizer, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False)
    inner.train_from_iterator((text(words, 200, generator) for _ in range(5000)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", chat_template=CHAT_TEMPLATE)


def resident() -> int:
    """Bytes of this process in memory, without what the allocator has free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def arrays_of(prompts: Prompts) -> int:
    """Bytes of the arrays that hold the prompts."""
    return sum(values.nbytes for block in prompts._blocks for values in vars(block).values())


def plain_seconds(tokenizer: Any, texts: Sequence[str]) -> float:
    """Seconds that the tokenizer takes for these texts by itself."""
    begun = time.perf_counter()
    for start in range(0, len(texts), BATCH_PROMPTS):
        tokenizer(texts[start : start + BATCH_PROMPTS], add_special_tokens=False)
    return time.perf_counter() - begun


def measure(count: int, tokens: int, chat: bool) -> dict[str, Any]:
    generator = random.Random(0)
    words = lexicon(40_000, generator)
    tokenizer = build_tokenizer(words, generator)
    sample = [text(words, 100, generator) for _ in range(200)]
    per_word = sum(len(ids) for ids in tokenizer(sample)["input_ids"]) / 200 / 100
    texts = [text(words, round(tokens / per_word), generator) for _ in range(count)]
    tasks = [Task(str(n), [{"role": "user", "content": t}] if chat else t) for n, t in enumerate(texts)]
    if chat:
        texts = [f"<|user|>{t}<|end|><|assistant|>" for t in texts]
    prompts = Prompts(tokenizer)
    # Both tokenizers fill their cache of words, and the allocator its arenas, before anything is measured.
    warm = [text(words, round(tokens / per_word), generator) for _ in range(2 * BATCH_PROMPTS)]
    plain_seconds(tokenizer, warm)
    prompts.lengths([Task(str(n), [{"role": "user", "content": t}] if chat else t) for n, t in enumerate(warm)])
    kept = arrays_of(prompts)
    before = resident()
    ours = plain = 0.0
    ids = compared = 0
    for number, start in enumerate(range(0, count, SLICE)):
        few = texts[start : start + SLICE // 5]
        if number % 2:
            plain += plain_seconds(tokenizer, few)
        begun = time.perf_counter()
        lengths = prompts.lengths(tasks[start : start + SLICE])
        ours += time.perf_counter() - begun
        if not number % 2:
            plain += plain_seconds(tokenizer, few)
        ids += int(lengths.sum())
        compared += int(lengths[: len(few)].sum())
    after = resident()
    return {
        "prompts": count,
        "tokens_a_prompt": round(ids / count, 1),
        "chat": chat,
        "bytes_a_token_arrays": round((arrays_of(prompts) - kept) / ids, 3),
        "bytes_a_token_rss": round((after - before) / ids, 3),
        "tokens_a_second": round(ids / ours),
        "tokens_a_second_tokenizer": round(compared / plain),
        "rate_ratio": round((ids / ours) / (compared / plain), 3),
        "seconds": round(ours, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument(
        "--out",
        type=result_file("prompts", "tokens_a_prompt", "bytes_a_token_arrays"),
        help="a JSON file, to whose list of runs this one is added",
    )
    options = parser.parse_args()
    result = measure(options.count, options.tokens, options.chat)
    result |= {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "command": " ".join(["python", "scripts/benchmarks/prompts.py", *sys.argv[1:]]),
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        runs = json.loads(options.out.read_text()) if options.out.exists() else []
        options.out.write_text(json.dumps([*runs, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
