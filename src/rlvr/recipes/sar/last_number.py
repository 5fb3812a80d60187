r"""Answers that are the last number of a response, wherever it stands."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import ClassVar

from rlvr.records import Task, Verdict
from rlvr.registry import register
from rlvr.verifiers.answers import unparsable
from rlvr.verifiers.base import Needs, Verifier
from rlvr.verifiers.math.math_verifier import MathVerifier

_VALUE = r"-?(?:\d+\.?\d*|\.\d+)"
# Matches `3`, `-0.5`, `\frac{1}{2}`, `- \frac{ 1 }{ 2 }`; of `1/2` it finds 2, of `1,000` it finds 000.
_NUMBER = re.compile(rf"-?\s*\\frac\s*\{{\s*{_VALUE}\s*\}}\s*\{{\s*{_VALUE}\s*\}}|{_VALUE}")


@register("verifier", "last_number")
@dataclass
class LastNumberVerifier(Verifier):
    r"""Checks the last number or \frac{a}{b} of a response against `task.answer`, in a box, in a sentence or in a step
    of the reasoning; a response without one is wrong. So it pays what `math` refuses: "43 or 42" for 42, "not 42", and
    a right number in the reasoning alone (`python -m rlvr.audit --verifier last_number --tricks`).

    The base reward of SAR's authors (amazon-science/Self-Aligned-Reward-Towards_Effective_and_Efficient_Reasoners,
    commit 08892d0, verl/utils/global_tools.py, `extract_answer`, and verl/utils/reward_score/general_math_reward.py).
    Whether two numbers are the same the verifier `math` says; theirs asks the package math-verify.
    """

    needs: ClassVar[Needs] = Needs(process=True)
    time_limit: float = 1.0
    """Seconds for one answer."""
    _math: MathVerifier = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # As math-verify, \frac{8}{2} is 4.
        self._math = MathVerifier(methods=("boxed",), require_simplified=False)

    def prepare(self) -> None:
        self._math.prepare()

    def check_task(self, task: Task) -> str | None:
        return self._math.check_task(task)

    def quick(self, task: Task, completion: str) -> Verdict | None:
        boxed = _boxed(completion)
        return unparsable("the response has no number") if boxed is None else self._math.quick(task, boxed)

    def verify(self, task: Task, completion: str) -> Verdict:
        boxed = _boxed(completion)
        return unparsable("the response has no number") if boxed is None else self._math.verify(task, boxed)

    def cache_key(self, task: Task, completion: str) -> Hashable | None:
        boxed = _boxed(completion)
        return None if boxed is None else self._math.cache_key(task, boxed)

    def same_answer(self, first: str, second: str) -> bool:
        """Return True if two answers are the same number."""
        return self._math.same_answer(first, second)


def _boxed(completion: str) -> str | None:
    r"""The last number as `\boxed{number}`; None where there is none."""
    found = deque(_NUMBER.finditer(completion), maxlen=1)
    # A full stop behind a number ends the sentence.
    return f"\\boxed{{{found[0][0].strip().rstrip('.')}}}" if found else None
