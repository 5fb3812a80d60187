"""The tasks of sft_then_grpo.yaml: sort three digits."""

import random

NUMBERS = [f"{n:03}" for n in range(1000)]
random.Random(0).shuffle(NUMBERS)


def train():
    """800 numbers. A third of the demonstrations are wrong: two neighbouring digits are exchanged."""
    mistakes = random.Random(1)
    for number in NUMBERS[:800]:
        answer = "".join(sorted(number))
        shown = answer
        if mistakes.random() < 1 / 3:
            place = mistakes.randrange(2)
            shown = answer[:place] + answer[place + 1] + answer[place] + answer[place + 2 :]
        yield {"prompt": f"{number}>", "answer": answer, "demonstration": shown}


def held_out():
    """The other numbers, which no stage trains on."""
    for number in NUMBERS[800:]:
        yield {"prompt": f"{number}>", "answer": "".join(sorted(number))}
