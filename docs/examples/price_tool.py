"""The tool, the tasks and the verifier of tool_use.yaml. Prices differ between tasks, so they cannot be memorised."""

import itertools
import random


def tasks():
    """Questions for the price of an item; the column `prices` goes to the task's info, which only the tool reads."""
    numbers = random.Random(0)
    for item, price in itertools.product("abcd", "0123456789"):
        prices = {other: numbers.choice("0123456789") for other in "abcd"} | {item: price}
        yield {"prompt": [{"role": "user", "content": item}], "answer": price, "prices": prices}


def price(text, task):
    """A tool is a function of the turn's text: `?b` asks for the price of b. None ends the rollout."""
    if text.startswith("?") and len(text) == 2:
        return task.info["prices"].get(text[1], "?")
    return None


def right_price(completion, prompt, answer, task):
    """1 for the price after a call for the right item. Parts of it earn less, or nothing would be found at first.

    `completion` has the policy's own turns, one a line: what the tool replied is never paid.
    """
    call, *rest = completion.split("\n")
    item = task.prompt[0]["content"]
    if call != f"?{item}":
        return 0.1 * call.startswith("?") + 0.2 * (call[1:] == item)
    if rest == [answer]:
        return 1.0
    return 0.6 if rest and rest[0].isdigit() else 0.4  # a price, but not the right one; or another call
