"""The verifier of format.yaml."""

import re

PARTS = [r"<think>", r"[^<]+</think>", r"<answer>", r"[^<]+</answer>"]


def in_tags(completion):
    """The share of the form that the completion begins with: 1 for <think>...</think><answer>...</answer> and no more.

    The built-in verifier `format` gives all or nothing, or a share for each tag wherever it stands. A policy with
    random weights finds the whole form sooner with a share for each part in its place.
    """
    place = 0
    for number, part in enumerate(PARTS):
        match = re.compile(part).match(completion, place)
        if match is None:
            return number / (len(PARTS) + 1)
        place = match.end()
    return 1.0 if place == len(completion) else len(PARTS) / (len(PARTS) + 1)
