"""The form of a response: its tags, thinking that was left out, and a gate of the form."""

from __future__ import annotations

import numpy as np
import pytest

from reward_helpers import make_batch
from rlvr.errors import ConfigError
from rlvr.rewards import build_terms


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


WHOLE = "<think>well</think><answer>4</answer>"


@pytest.mark.parametrize(
    ("text", "soft", "hard"),
    [
        (WHOLE, 1, 1),
        (" <think>a b</think>\n<answer>4</answer> ", 1, 1),
        ("", 0, 0),
        ("<think>well</think> 4", 0.5, 0),
        ("<answer>4</answer><think>well</think>", 0.5, 0),  # the tags of the answer stand before their place
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.5, 0),
        (WHOLE + "more", 1, 0),
        ("</answer></answer>", 0, 0),
    ],
)
def test_the_form_of_a_response(column, text, soft, hard):
    batch = make_batch([1.0], texts=[text])
    close(column(batch, {"name": "format", "strictness": "soft"}), [soft])
    close(column(batch, {"name": "format", "strictness": "tags"}), [soft == 1])
    close(column(batch, "format"), [hard])
    close(column(batch, {"name": "format", "strictness": "off"}), [1])


def test_a_form_that_the_prompt_began(column):
    batch = make_batch([1.0], texts=["well</think><answer>4</answer>"])
    for strictness in ("soft", "hard"):
        close(column(batch, {"name": "format", "prompt_wrote": "<think>", "strictness": strictness}), [1])


@pytest.mark.parametrize(
    ("text", "skips"),
    [
        ("</think>4", 1),
        ("<think> \n</think>4", 1),
        ("<think>hm</think>4", 0),
        ("4", 0),
        ("", 0),
        ("hm</think></think>", 0),
    ],
)
def test_thinking_given_away(column, text, skips):
    close(column(make_batch([1.0], texts=[text]), "no_thinking"), [skips])


def test_a_template_without_tags_has_no_soft_form():
    with pytest.raises(ConfigError, match="has none"):
        build_terms([{"name": "format", "template": "So {answer}.", "strictness": "soft"}])
    with pytest.raises(ConfigError, match=r"tags counts tags, and .* has none"):
        build_terms([{"name": "format", "template": "So {answer}.", "strictness": "tags"}])


def test_a_closed_gate_of_no_form_is_the_verdict(column, nan):
    batch = make_batch([1.0, 0.0, None], texts=["no tags", WHOLE, WHOLE])
    off = {"name": "gate", "by": {"name": "format", "strictness": "off"}}
    close(column(batch, off), [1, 0, nan])
    close(column(batch, {"name": "gate", "by": "format"}), [0, 0, nan])
