"""Tasks with a known answer that the built-in tricks are tried on where no others are given, by verifier."""

from __future__ import annotations

from typing import Any

from rlvr.records import Task
from rlvr.verifiers.audit.trial import Example


def _example(
    prompt: str, answer: Any = None, *, completion: str | None = None, gold: str | None = None, **info: Any
) -> Example:
    return Example(Task(id=prompt, prompt=prompt, answer=answer, info=info), completion, gold, junk_is_wrong=True)


_SUM = _example("What is 6 times 7?", "42")
_FRACTION = _example("What is 3 divided by 8?", r"\frac{3}{8}")
_ROOTS = _example("Solve x^2 - 5x + 6 = 0.", "2, 3")
_CITY = _example("What is the capital of France?", "Paris")
_SENTENCE = _example("Say who wrote Faust.", "Faust was written by Johann Wolfgang von Goethe")
_OSLO_CALL = '<think> so </think>\n<tool_call>\n{"name": "weather", "parameters": {"city": "Oslo"}}\n</tool_call>'

EXAMPLES: dict[str, tuple[Example, ...]] = {
    "math": (
        _SUM,
        _FRACTION,
        _ROOTS,
        _example("Differentiate x^3.", "3x^2"),
        _example("For which x is x^2 < 4?", "(-2, 2)"),
        _example("What is the square root of 8?", r"2\sqrt{2}"),
        _example("What is 1 divided by a million to the fifth?", "10^{-30}"),
        _example("Solve $2x > 6$ for x.", "x > 3"),
        _example("Find y: $3y = 12 + y$.", "6"),
        _example("Multiply out $(7a - 7b)(7a + 7b)$.", "49 a^2 - 49 b^2"),
        _example("How far does sound go in 3 seconds?", r"1029 \text{ m}"),
    ),
    "exact": (_SUM, _CITY),
    "regex": (_example("Which year is in Orwell's title?", r"(?:19|20)84", gold="1984"),),
    "numeric": (_SUM, _example("What is 1 divided by 8?", "0.125")),
    "last_number": (_SUM, _FRACTION),
    "shop_action": (
        _example(
            "You want red shoes. What do you do next?",
            {"type": "type_and_submit", "name": "search_input", "text": "red running shoes"},
            gold='{"rationale": "I look for shoes.", "action": {"type": "type_and_submit", "name": "search_input", '
            '"text": "red running shoes"}}',
        ),
    ),
    "token_f1": (_CITY, _SENTENCE),
    "rouge": (_CITY, _SENTENCE),
    "bleu": (_SENTENCE,),
    "choice": (
        _example("Which is a prime? A) 4 B) 7 C) 9 D) 10", "B", options=["4", "7", "9", "10"]),
        _example("Where is Oslo?", "Norway", options=["Sweden", "Norway", "Denmark"]),
    ),
    "json_schema": (
        _example(
            "Write a city and its population as JSON.",
            gold='{"city": "Oslo", "population": 700000}',
            schema={
                "type": "object",
                "properties": {
                    "city": {"type": "string", "minLength": 1},
                    "population": {"type": "integer", "minimum": 1},
                },
                "required": ["city", "population"],
                "additionalProperties": False,
            },
        ),
    ),
    "tool_calls": (
        _example(
            "What is the weather in Oslo?",
            [{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}],
            gold='<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}\n</tool_call>',
        ),
    ),
    "toolrl": (
        _example(
            "Use a tool: what is the weather in Oslo?",
            _OSLO_CALL,
            completion=_OSLO_CALL,
        ),
    ),
    "reasoning_gym": (_example("Compute 6 * 7.", "42", dataset="basic_arithmetic", metadata={}),),
    "countdown": (_example("Make 42 of 6 and 7.", gold="6 * 7", numbers=[6, 7], target=42),),
    "knights_and_knaves": (
        _example(
            "Zoey and Jack are knights or knaves. Who is what?",
            gold="Zoey is a knight, Jack is a knave",
            assignment={"Zoey": "knight", "Jack": "knave"},
        ),
    ),
    "sudoku": (
        _example(
            "Fill in the grid.",
            gold="1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1",
            puzzle=[[1, 0, 0, 4], [0, 4, 1, 0], [2, 0, 0, 3], [0, 3, 2, 0]],
        ),
    ),
    "label": (_example("Is 42 even? Say yes or no.", "yes", labels=["yes", "no"]),),
    "rating": (_example("Rate the poem from 1 to 10.", 7),),
    "ranking": (_example("Rank the passages.", {"1": 3, "2": 1, "3": 0}, gold="[1] > [2] > [3]"),),
    "boxes": (_example("Where is the dog? [x1, y1, x2, y2]", [10, 20, 110, 220], gold="[10, 20, 110, 220]"),),
    "interval": (_example("When does the dog bark?", [10.0, 12.5], gold="[10.0, 12.5]"),),
    "point": (_example("Point at the dog.", [10, 20, 30, 40], gold="(20, 30)"),),
    "code": (
        _example(
            "Write f(x), which multiplies x by 42.",
            gold="def f(x):\n    return x * 42",
            kind="function",
            name="f",
            cases=[{"args": [1], "expected": 42}, {"args": [-3], "expected": -126}],
        ),
        _example(
            "Write last(items), which gives the last item.",
            gold="```python\ndef last(items):\n    return items[-1]\n```",
            kind="asserts",
            entry_point="last",
            tests=["assert last([1, 2, 3]) == 3", "assert last('ab') == 'b'"],
        ),
        _example(
            "Print the sum of the numbers that are read.",
            gold="numbers = input().split()\nprint(sum(map(int, numbers)) * 1)",
            kind="stdio",
            cases=[{"input": "1 2", "output": "3"}, {"input": "4 5 6", "output": "15"}],
        ),
    ),
    "format": (_example("Think, then answer.", completion="<think>It is 6 * 7.</think>\n<answer>42</answer>"),),
    "instructions": (
        _example(
            "End with the words `Any questions?` what you write about the sea: 12 words or more, with the word ocean.",
            completion="The ocean is wide, and its tides come and go every day. Any questions?",
            instruction_id_list=["keywords:existence", "length_constraints:number_words", "startend:end_checker"],
            kwargs=[
                {"keywords": ["ocean"]},
                {"relation": "at least", "num_words": 12},
                {"end_phrase": "Any questions?"},
            ],
        ),
        _example(
            "Write about bread without the word sugar, and end with `Enjoy it.`",
            completion="Bread is made of flour and water. Enjoy it.",
            instruction_id_list=["keywords:forbidden_words", "startend:end_checker"],
            kwargs=[{"forbidden_words": ["sugar"]}, {"end_phrase": "Enjoy it."}],
        ),
    ),
}
"""Of the registered verifiers; any other one is tried on `ANY`."""

ANY = (_SUM, _CITY, EXAMPLES["choice"][0])


def examples_for(verifier: str) -> list[Example]:
    """Return the examples that the verifier of that name is tried on."""
    return list(EXAMPLES.get(verifier, ANY))
