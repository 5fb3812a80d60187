"""The tasks of code.yaml: two values of a function are given, and the function is to be written in Python."""

import itertools
import random


def train():
    """Rows with a prompt, tests of the kind `function`, and a solution."""
    functions = [f"x{operator}{n}" for operator, n in itertools.product("+-*", range(2, 10))]
    random.Random(0).shuffle(functions)
    for body in functions:
        yield {
            "prompt": f"f(2)={value(body, 2)} f(5)={value(body, 5)} ",
            "kind": "function",
            "name": "f",
            "cases": [{"args": [x], "expected": value(body, x)} for x in (11, 20, -3)],
            "demonstration": f"def f(x):return {body}",
        }


def value(body: str, x: int) -> int:
    """The value at `x` of x+n, x-n or x*n."""
    n = int(body[2:])
    return {"+": x + n, "-": x - n, "*": x * n}[body[1]]
