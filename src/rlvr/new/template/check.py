"""The verifier of run.yaml: a function of the completion, its arguments filled by name.

It may also take `prompt`, `task`, `messages`, or any other column of the tasks. 1 is right, 0 is wrong, between
them is partial, and None is undecided.
"""


def sorted_digits(completion: str, answer: str) -> float:
    """1 for the digits in rising order, else 0."""
    return float(completion == answer)
