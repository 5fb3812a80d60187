"""Prompts and replies are encoded on other threads than the trainer's, and neither changes the other's token ids."""

import threading

import pytest

from rlvr.data import Prompts
from rlvr.records import Task

TASKS = [Task("text", "2+2"), Task("chat", [{"role": "user", "content": "2+2"}])]


@pytest.mark.parametrize("task", TASKS)
def test_encoding_a_reply_leaves_the_settings_of_the_tokenizer_alone(tokenizer, task):
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(7)
    backend.enable_padding(length=9)
    backend.encode_special_tokens = True
    prompts = Prompts(tokenizer)
    prompts.reply(task, "no <a> token", "user", None)
    prompts(task)
    assert backend.encode_special_tokens
    assert backend.truncation["max_length"] == 7
    assert backend.padding["length"] == 9


def test_settings_of_the_tokenizer_do_not_reach_prompts_and_replies(tokenizer):
    prompts = Prompts(tokenizer)
    before = [(prompts(task), prompts.reply(task, "no <a> token", "user", None)) for task in TASKS]
    tokenizer.split_special_tokens = True
    tokenizer.chat_template = "another"
    tokenizer.padding_side = "left"
    anew = [Task("more", task.prompt) for task in TASKS]
    assert [(prompts(task), prompts.reply(task, "no <a> token", "user", None)) for task in anew] == before


def test_special_tokens_stay_special_while_another_thread_encodes_replies(tokenizer):
    prompts = Prompts(tokenizer)
    wanted = tokenizer.encode("<a>", add_special_tokens=False)
    reply = prompts.reply(TASKS[0], "<a> " * 20, "user", None)
    assert len(wanted) == 1
    assert len(reply) == 80
    done, wrong = threading.Event(), []

    def answer():
        while not done.is_set():
            if prompts.reply(TASKS[0], "<a> " * 20, "user", None) != reply:
                wrong.append("reply")

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        for _ in range(5000):
            if tokenizer.encode("<a>", add_special_tokens=False) != wanted:
                wrong.append("special token")
    finally:
        done.set()
        thread.join()
    assert wrong == []
