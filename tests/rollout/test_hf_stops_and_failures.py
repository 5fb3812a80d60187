"""Why completions end, what is refused, and what happens to requests when a step fails or nobody wants them any
more."""

import asyncio
import logging

import pytest
import torch
from engine_helpers import (
    PATIENCE,
    Spy,
    alphabet_chain,
    ask,
    ask_all,
    chain,
    ids_of,
    small,
    some_requests,
)

from rlvr.errors import DataError
from rlvr.policy import Policy
from rlvr.records import StopReason
from rlvr.rollout import HFEngine, HFEngineOptions, Request, Sampling


@pytest.fixture(scope="module")
def policy():
    return small()


@pytest.fixture(scope="module")
def wordy():
    return small(words=["hello", "gh"])


def one(policy, prompt, max_new_tokens=20, **sampling):
    """The completion of one text prompt."""
    return ask(HFEngine(policy), [Request(ids_of(policy, prompt), Sampling(max_new_tokens, **sampling), 0)])[0]


def test_the_end_token_ends_a_completion_and_is_counted(policy, monkeypatch):
    chain(monkeypatch, policy, alphabet_chain(policy, "abcde", end=True))
    completion = one(policy, "b")
    assert (completion.stop, completion.text) == (StopReason.END, "cde")
    assert completion.token_ids.tolist() == [*ids_of(policy, "cde"), policy.tokenizer.eos_token_id]
    assert completion.logprobs.tolist() == [0.0] * 4
    assert not completion.stop.truncated


def test_an_end_token_as_the_last_allowed_token_is_an_end(policy, monkeypatch):
    chain(monkeypatch, policy, alphabet_chain(policy, "abcde", end=True))
    assert one(policy, "b", 4).stop == StopReason.END
    assert one(policy, "b", 3).stop == StopReason.LENGTH


def test_an_empty_completion_is_one_end_token(policy, monkeypatch):
    chain(monkeypatch, policy, alphabet_chain(policy, "abcde", end=True))
    completion = one(policy, "abcde")
    assert (completion.text, completion.stop) == ("", StopReason.END)
    assert completion.token_ids.tolist() == [policy.tokenizer.eos_token_id]


def test_every_end_token_of_the_generation_config_ends(monkeypatch):
    policy = small()
    extra = ids_of(policy, "k")[0]
    policy.causal_lm.generation_config.eos_token_id = [policy.tokenizer.eos_token_id, extra]
    assert policy.end_ids == {policy.tokenizer.eos_token_id, extra}
    chain(monkeypatch, policy, alphabet_chain(policy, "abckde"))
    completion = one(policy, "a")
    assert (completion.stop, completion.text) == (StopReason.END, "bck")


def test_ignore_eos_samples_on(policy, monkeypatch):
    following = {**alphabet_chain(policy, "abc", end=True), policy.tokenizer.eos_token_id: ids_of(policy, "a")[0]}
    chain(monkeypatch, policy, following)
    completion = one(policy, "a", 7, ignore_eos=True)
    assert (completion.stop, completion.text) == (StopReason.LENGTH, "bcabc")
    assert completion.token_ids.tolist().count(policy.tokenizer.eos_token_id) == 2


def test_length_and_context_truncate(policy, monkeypatch):
    chain(monkeypatch, policy, alphabet_chain(policy, "abc"))
    assert one(policy, "a", 7).stop == StopReason.LENGTH
    near = "a" * (policy.context - 6)
    completion = one(policy, near, 50)
    assert (completion.stop, len(completion.token_ids)) == (StopReason.CONTEXT, 6)
    assert one(policy, near, 6).stop == StopReason.LENGTH
    assert one(policy, near, 5).stop == StopReason.LENGTH
    last = one(policy, "a" * (policy.context - 1), 50)
    assert (last.stop, last.text) == (StopReason.CONTEXT, "b")
    assert StopReason.CONTEXT.truncated
    assert StopReason.LENGTH.truncated


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (("cd",), "bcd"),  # over two tokens
        (("b",), "b"),  # the first token
        (("ab",), "bcdefab"),  # begun by the prompt does not count
        (("zz", "efa", "cdef"), "bcdef"),  # whichever comes first
        (("defabcdefabcde",), "bcdefabcdefabcde"),  # longer than the window's margin
        (("x",), "bcdefabcdefabcdefabc"),
    ],
)
def test_stop_strings_end_a_completion_and_stay_in_it(policy, monkeypatch, stop, text):
    chain(monkeypatch, policy, alphabet_chain(policy, "abcdef"))
    completion = one(policy, "a", stop=stop)
    assert completion.text == text
    assert completion.stop == (StopReason.LENGTH if stop == ("x",) else StopReason.STOP_STRING)
    assert completion.token_ids.tolist() == list(ids_of(policy, text))  # sampling stopped right there


def test_a_stop_string_may_begin_and_end_inside_tokens(wordy, monkeypatch):
    hello, gh = ids_of(wordy, "hello")[0], ids_of(wordy, "gh")[0]
    a, b = ids_of(wordy, "ab")
    chain(monkeypatch, wordy, {a: hello, hello: gh, gh: b, b: a})
    completion = one(wordy, "a", stop=("log",))
    assert (completion.stop, completion.text) == (StopReason.STOP_STRING, "hellogh")


def test_a_stop_string_that_the_last_allowed_token_completes_is_a_stop(policy, monkeypatch):
    chain(monkeypatch, policy, alphabet_chain(policy, "abcdef"))
    assert one(policy, "a", 3, stop=("cd",)).stop == StopReason.STOP_STRING
    assert one(policy, "a", 2, stop=("cd",)).stop == StopReason.LENGTH
    near = "f" * (policy.context - 4) + "a"
    assert one(policy, near, 30, stop=("cd",)).stop == StopReason.STOP_STRING


def test_stop_strings_of_one_request_are_not_those_of_another(policy, monkeypatch):
    chain(monkeypatch, policy, alphabet_chain(policy, "abcdef"))
    prompt = ids_of(policy, "a")
    requests = [Request(prompt, Sampling(9, stop=stop), 0) for stop in [("d",), (), ("e", "q"), ("zz",)]]
    assert [c.text for c in ask(HFEngine(policy), requests)] == ["bcd", "bcdefabcd", "bcde", "bcdefabcd"]


def test_a_stop_string_of_characters_that_are_several_tokens_each_is_seen(monkeypatch):
    """With a byte-level vocabulary a character outside ASCII is up to four tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    text, stop = "好的。我们停止在这里吧🙂🙂🙂再见", "停止在这里吧🙂🙂🙂"
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<eos>")
    model = small(alphabet="".join(chr(1000 + i) for i in range(260))).model
    policy = Policy(model, tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > 2 * len(text)
    real = policy.next_logits

    def say(input_ids, attention_mask, position_ids, cache):
        logits = torch.full_like(real(input_ids, attention_mask, position_ids, cache), -torch.inf)
        logits[:, ids[int(attention_mask.sum()) - 1]] = 0.0
        return logits

    monkeypatch.setattr(policy, "next_logits", say, raising=False)
    completion = ask(HFEngine(policy), [Request((5,), Sampling(len(ids), stop=(stop,)), 0)])[0]
    assert (completion.stop, completion.text) == (StopReason.STOP_STRING, text[: text.index(stop) + len(stop)])


# What is refused


@pytest.mark.parametrize("length", [0, 96, 97, 500])
def test_a_prompt_without_room_is_refused(policy, length):
    with pytest.raises(DataError, match=f"a prompt of {length} tokens.*context is 96"):
        ask(HFEngine(policy), [Request((5,) * length, Sampling(4), 0)])


def test_a_refused_request_leaves_the_others_alone(policy):
    async def main():
        engine = HFEngine(policy)
        good = some_requests(policy, 3)
        work = [engine.generate(r) for r in [good[0], Request((), Sampling(4), 0), *good[1:]]]
        return await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), PATIENCE)

    results = asyncio.run(main())
    assert isinstance(results[1], DataError)
    assert all(r.stop for i, r in enumerate(results) if i != 1)


# A step that fails


class FailingError(Exception):
    pass


@pytest.mark.parametrize("failing_call", [1, 2, 3, 6], ids=["prefill", "second prefill", "third prefill", "decoding"])
@pytest.mark.parametrize("max_rows", [512, 4])
def test_a_failing_step_fails_every_request_and_the_engine_works_afterwards(
    policy, monkeypatch, failing_call, max_rows
):
    requests = some_requests(policy, 9, seed=1, longest=12)
    expected = ask(HFEngine(policy), requests)
    engine = HFEngine(policy, HFEngineOptions(prefill_tokens=40, max_rows=max_rows))

    def before(spy):
        if len(spy.shapes) == failing_call:
            raise FailingError("out of memory, say")

    Spy(monkeypatch, policy, before=before)

    async def main():
        work = [engine.generate(r) for r in requests]
        failed = await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), PATIENCE)
        return failed, await ask_all(engine, requests)

    failed, again = asyncio.run(main())
    gone = [f for f in failed if isinstance(f, BaseException)]
    assert gone
    assert all(isinstance(f, FailingError) and "out of memory" in str(f) for f in gone)
    for result, want in zip(failed, expected, strict=True):  # those that had ended before keep what they have
        assert isinstance(result, FailingError) or result.token_ids.tolist() == want.token_ids.tolist()
    assert [c.token_ids.tolist() for c in again] == [c.token_ids.tolist() for c in expected]


# Requests that nobody waits for any more


def test_cancelled_requests_free_their_rows(monkeypatch):
    policy = small(context=4096)
    spy = chain(monkeypatch, policy, alphabet_chain(policy, "abc"))
    engine = HFEngine(policy)
    prompt = ids_of(policy, "ca")

    async def main():
        tasks = [asyncio.ensure_future(engine.generate(Request(prompt, Sampling(3000), i))) for i in range(40)]
        keeper = asyncio.ensure_future(engine.generate(Request(prompt, Sampling(60), 99)))
        while len(spy.shapes) < 10:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        completion = await asyncio.wait_for(keeper, PATIENCE)
        assert len(completion.token_ids) == 60
        while len(asyncio.all_tasks()) > 1:  # the engine's own ends when nothing is left
            await asyncio.sleep(0)

    asyncio.run(main())
    assert spy.decoded_rows[3] == 41
    assert spy.decoded_rows[-1] == 1
    assert len(spy.shapes) < 70  # nobody decoded 3000 tokens for them


def test_cancelled_requests_make_room_for_those_that_wait_and_are_not_prefilled(policy, monkeypatch):
    spy = Spy(monkeypatch, policy)
    engine = HFEngine(policy, HFEngineOptions(max_rows=3))
    long, short = ids_of(policy, "abc"), ids_of(policy, "abcdef")

    async def main():
        hogs = [
            asyncio.ensure_future(engine.generate(Request(long, Sampling(90, ignore_eos=True), i))) for i in range(3)
        ]
        unwanted = [asyncio.ensure_future(engine.generate(Request(long + long, Sampling(9), i))) for i in range(20)]
        wanted = [asyncio.ensure_future(engine.generate(Request(short, Sampling(9), i))) for i in range(3)]
        while len(spy.shapes) < 5:
            await asyncio.sleep(0)
        for task in [*hogs, *unwanted]:
            task.cancel()
        await asyncio.wait_for(asyncio.gather(*wanted), PATIENCE)

    asyncio.run(main())
    assert max(spy.decoded_rows) == 3
    assert spy.prefills == [(1, 3), (1, 6)]
    assert len(spy.shapes) < 40


def test_a_given_up_run_of_the_loop_leaves_the_engine_usable(policy, caplog):
    engine = HFEngine(policy)
    requests = some_requests(policy, 5, seed=2)
    expected = [c.token_ids.tolist() for c in ask(HFEngine(policy), requests)]

    async def hasty():
        work = asyncio.gather(
            *(engine.generate(r) for r in some_requests(policy, 8, max_new_tokens=80, ignore_eos=True))
        )
        await asyncio.wait_for(work, 0.005)

    with pytest.raises(TimeoutError):
        asyncio.run(hasty())
    with caplog.at_level(logging.ERROR):
        assert [c.token_ids.tolist() for c in ask(engine, requests)] == expected
    assert not caplog.records
