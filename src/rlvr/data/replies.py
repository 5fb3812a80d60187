"""Replies of a tool or an environment, as the token ids that follow a turn of the policy's.

In a text prompt the reply is text and nothing else. In a chat it is a message: what the chat template puts between an
assistant's turn and the next one, from behind the end-of-turn token, which the policy sampled itself. Invariants: only
the reply is tokenised, never what was sampled; a reply is text, so a special token written in it is not taken for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlvr.errors import ConfigError

# Words that no chat template writes: what stands around them in the rendered text is the template's.
_TURN = "RlvrTurnMark"
_REPLY = "RlvrReplyMark"


@dataclass(frozen=True)
class Frame:
    """The text that a chat template puts round a message that follows an assistant's turn."""

    before: str
    """From the end of the turn's text (so with its end-of-turn token) to the message's text."""
    after: str
    """From the end of the message's text to where the next turn begins."""


def frame_of(tokenizer: Any, role: str, options: Mapping[str, Any]) -> Frame:
    """The frame of messages of `role`, read off a rendered chat. ConfigError where the template allows no such
    message."""
    import jinja2

    trouble = f"the chat template takes no message of the role {role!r} after an assistant's turn"
    fix = "set rollout.plan.role to another one (user, tool)"
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "the prompt is a chat, but the tokenizer has no chat template: use an instruction-tuned model"
        )
    turns = (("user", "?"), ("assistant", _TURN), (role, _REPLY))
    chat = [{"role": speaker, "content": content} for speaker, content in turns]
    try:
        how = {**options, "add_generation_prompt": True, "tokenize": False}
        text = str(tokenizer.apply_chat_template(chat, **how))
    # A template raises TemplateError for a role that it does not know; Python code inside it may raise the others.
    except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{trouble} ({type(error).__name__}: {error}): {fix}") from error
    _, turn, rest = text.partition(_TURN)
    before, reply, after = rest.partition(_REPLY)
    # For example a template that drops the assistant's text before a reply, or repeats the first message in each turn.
    if not (turn and reply) or _TURN in rest or _REPLY in after:
        raise ConfigError(f"{trouble}: it leaves one of the two out, or gives it twice; {fix}")
    # A character-level tokenizer may lack a character of the template, which would become `unk` in every reply.
    if _unknown(tokenizer, before + after):
        raise ConfigError(f"the tokenizer has no tokens for {before!r}, which the chat template writes: {fix}")
    return Frame(before, after)


def reply_ids(text: str, tokenizer: Any, frame: Frame | None, end: int | None) -> list[int]:
    """The token ids of a reply: bare text without a frame, else the message in its frame.

    `end` is the end token that the policy sampled, which is left out of the frame; None where it was cut by a stop
    string.
    """
    if frame is None:
        return _plain(text, tokenizer)
    before = frame.before
    if end is not None:
        # The policy sampled the end token already: with the template's own it would stand there twice.
        before = _behind(before, str(tokenizer.decode([end])))
    # In three parts then: `split_special_tokens` cannot hold for a part of one call.
    if any(token.content in text for token in tokenizer.added_tokens_decoder.values() if token.special):
        return [*_parsed(before, tokenizer), *_plain(text, tokenizer), *_parsed(frame.after, tokenizer)]
    return _parsed(before + text + frame.after, tokenizer)  # in one piece, as the template's own rendering is


def _behind(text: str, end: str) -> str:
    """`text` without the end token that it begins with, if it does."""
    # Some templates put a line break between the text and the end token; it goes with the token.
    if text.lstrip().startswith(end):
        return text.lstrip().removeprefix(end)
    return text


def _unknown(tokenizer: Any, text: str) -> bool:
    unknown = tokenizer.unk_token_id
    return unknown is not None and tokenizer.unk_token not in text and unknown in _parsed(text, tokenizer)


def _parsed(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _plain(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
