"""The tool, the tasks and the verifier of tool_use.yaml. Prices differ between tasks, so they cannot be memorised."""

import itertools
import random


def tasks():
    """Questions for the price of an item; the column `prices` goes to the task's info, which only the tool reads."""
    numbers = random.Random(0)
    for item, price in itertools.product("abcd", "0123456789"):
        prices = {other: numbers.choice("0123456789") for other in "abcd"} | {item: price}
        question = {"role": "user", "content": item}
        yield {"id": f"{item}{price}", "prompt": [question], "answer": price, "prices": prices}


def demonstrations():
    """A call, an answer to the tool's reply, and a guess without a call, in equal parts."""
    guesses = random.Random(1)
    for task in tasks():
        item, price = task["prompt"][0]["content"], task["answer"]
        replied = [{"role": "assistant", "content": f"?{item}"}, {"role": "user", "content": price}]
        yield {**task, "id": f"{task['id']}-call", "demonstration": f"?{item}"}
        yield {**task, "id": f"{task['id']}-answer", "prompt": task["prompt"] + replied, "demonstration": price}
        yield {**task, "id": f"{task['id']}-guess", "demonstration": guesses.choice("0123456789")}


def price(text, task):
    """A tool is a function of the turn's text: `?b` asks for the price of b. None ends the rollout."""
    if text.startswith("?") and len(text) == 2:
        return task.info["prices"].get(text[1], "?")
    return None


def right_price(completion, answer):
    """1 for the right price after one call, also where it could have been guessed.

    `completion` has the policy's own turns, one a line: what the tool replied is never paid.
    """
    return float(completion.split("\n")[1:] == [answer])
