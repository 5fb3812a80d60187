"""The verifier of run.yaml: a function of the completion, its arguments filled by name.

It may also take `prompt`, `task`, `messages`, or any other column of the tasks. 1 is right, 0 is wrong, between
them is partial, and None is undecided.
"""


def sorted_digits(completion: str, answer: str) -> float:
    """1 for the right answer, else half of the share of its digits that stand in their place."""
    if completion == answer:
        return 1.0
    right = sum(one == other for one, other in zip(completion, answer, strict=False))
    return 0.5 * right / len(answer)
