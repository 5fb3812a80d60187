"""Tasks -> token ids: prompts through a template and the tokenizer, demonstrations as completions.

Invariants: only `{prompt}` is replaced in a template, other braces stay; a prompt is tokenised once and alone, so the
ids of prompt and completion are joined as ids, never as text. Works with any Hugging Face tokenizer and imports none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlvr.errors import DataError, nearest
from rlvr.records import Messages, Task

SLOT = "{prompt}"
CHAT = "chat"
"""The template that makes a chat of a text prompt and adds nothing."""

TemplateSpec = str | Mapping[str, Any] | None


@dataclass(frozen=True)
class Template:
    """The text round a prompt, as `data.template` writes it.

    A string (inline, or the path of a file, whose last line break is dropped) is `wrap`; the word `chat` makes a text
    prompt the user message of a chat, as it is; a mapping gives the others.
    """

    wrap: str | None = None
    """Text with `{prompt}`, put round a text prompt or round the last user message of a chat. Text stays text."""
    user: str | None = None
    """The same, and a text prompt becomes the user message of a chat."""
    system: str | None = None
    """The system message of the chat (in place of the row's own, if it has one); a text prompt becomes a chat."""
    text: str | None = None
    """Text with `{prompt}`; a chat's system and user messages become text, joined by blank lines: for base models."""
    assistant: str | None = None
    """The begin of the assistant's first turn, behind what the chat template opens it with: `<think>\\n`. A text prompt
    becomes a chat. It is part of the prompt: no verifier sees it, and nothing of it trains."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the tokenizer's chat template, for example `{enable_thinking: false}`."""

    @classmethod
    def parse(cls, spec: TemplateSpec | Template) -> Template:
        """The template that `spec` writes. DataError: unknown key, missing file, text without `{prompt}`."""
        if isinstance(spec, Template):
            return spec
        if spec is None:
            return cls()
        if spec == CHAT:
            return cls(user=SLOT)
        if isinstance(spec, str):
            # A text with the slot is the template itself; without it, it can only be a path.
            return cls(wrap=_with_slot("template", spec if SLOT in spec else _read(spec)))
        keys = ("user", "system", "assistant", "text", "options")
        for key, value in spec.items():
            if key not in keys:
                raise DataError(f"a template has no key {key!r}{nearest(key, keys)}")
            kind, wanted = (Mapping, "an object") if key == "options" else (str, "text")
            if value is not None and not isinstance(value, kind):
                raise DataError(f"template.{key} must be {wanted}, not {value!r}")
        if spec.get("text") is not None and any(spec.get(key) is not None for key in ("user", "system", "assistant")):
            raise DataError(
                "a template makes text (`text`) or a chat (`user`, `system`, `assistant`), not both: drop one"
            )
        for key in ("user", "text"):
            if spec.get(key) is not None:
                _with_slot(f"template.{key}", spec[key])
        return cls(**{key: value for key, value in spec.items() if value is not None})

    def apply(self, prompt: str | Messages) -> str | Messages:
        """The prompt with the template put round it: still text, or still a chat, unless the template changes that."""
        if self.text is not None:
            return self.text.replace(SLOT, prompt if isinstance(prompt, str) else _joined(prompt))
        if isinstance(prompt, str):
            if self.user is None and self.system is None and self.assistant is None:
                if self.wrap is None:
                    return prompt
                return self.wrap.replace(SLOT, prompt)
            prompt = [{"role": "user", "content": prompt}]
        # `user` makes a chat of a text; on a chat both do the same.
        around = self.user if self.user is not None else self.wrap
        messages = prompt if around is None else _wrapped(prompt, around)
        if self.assistant is not None and messages[-1]["role"] == "assistant":
            raise DataError("the prompt has the begin of an answer already: drop it, or template.assistant")
        if self.system is None:
            return messages
        # A chat template takes one system message; the configured one goes before the row's.
        rest = messages[1:] if messages[0]["role"] == "system" else messages
        return [{"role": "system", "content": self.system}, *rest]


def render_prompt(task: Task, tokenizer: Any, template: TemplateSpec | Template = None) -> list[int]:
    """The token ids of the task's prompt, ready for generation.

    A text prompt is used verbatim: nothing is added but the begin-of-sequence token of a tokenizer that adds one by
    default, and that not when the text begins with it. Messages go through the chat template and open the assistant's
    turn; a last message of the assistant's own is continued. DataError names the task.
    """
    return render_prompts([task], tokenizer, template)[0]


def render_prompts(tasks: Sequence[Task], tokenizer: Any, template: TemplateSpec | Template = None) -> list[list[int]]:
    """The token ids of each task's prompt, as `render_prompt` gives them; the texts are tokenised together."""
    around = Template.parse(template)
    prompts = [_applied(task, around) for task in tasks]
    kinds = [_kind(prompt) for prompt in prompts]
    ids: list[list[int]] = [[] for _ in tasks]
    # Each kind in one call: a batch has to be continued or opened as a whole, and texts are no chats.
    for kind in sorted(set(kinds)):
        where = [number for number, other in enumerate(kinds) if other == kind]
        alike = [prompts[number] for number in where]
        if kind == "text":
            encoded = _text_ids(alike, tokenizer)
        else:
            encoded = _chat_ids(alike, [tasks[number] for number in where], tokenizer, around)
        for number, prompt_ids in zip(where, encoded, strict=True):
            ids[number] = prompt_ids
    for task, prompt_ids in zip(tasks, ids, strict=True):
        if not prompt_ids:
            raise DataError(f"{task.named}: the prompt has no tokens; there is nothing to continue")
    return ids


def _applied(task: Task, around: Template) -> str | Messages:
    try:
        return around.apply(task.prompt)
    except DataError as error:
        raise DataError(f"{task.named}: {error}") from error


def _kind(prompt: str | Messages) -> str:
    """Prompts of one kind are encoded by one call."""
    if isinstance(prompt, str):
        return "text"
    if prompt[-1]["role"] == "assistant":
        return "continued chat"
    return "chat"


def render_demonstration(task: Task, tokenizer: Any) -> list[int]:
    """The token ids of the demonstration as a completion: its text, tokenised alone, and the end-of-sequence token.

    They are what the policy would have to sample after `render_prompt`. DataError names a task without a demonstration,
    and a tokenizer without an end-of-sequence token.
    """
    return render_demonstrations([task], tokenizer)[0]


def render_demonstrations(tasks: Sequence[Task], tokenizer: Any) -> list[list[int]]:
    """The token ids of each task's demonstration, as `render_demonstration` gives them, tokenised together."""
    texts = []
    for task in tasks:
        if task.demonstration is None:
            raise DataError(
                f"{task.named} has no demonstration; map one (fields: {{demonstration: COLUMN}}) or leave it out"
            )
        texts.append(task.demonstration)
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError(
            "the tokenizer has no end-of-sequence token, which ends a demonstration: set tokenizer.eos_token"
        )
    # A demonstration may be written with its end-of-sequence token; a second one would never be sampled.
    return [ids if ids[-1:] == [end] else [*ids, end] for ids in _bare(texts, tokenizer)]


def _text_ids(texts: Sequence[Any], tokenizer: Any) -> list[list[int]]:
    # What a tokenizer appends by default (an end of sequence) is left out: the completion follows.
    bare = _bare(texts, tokenizer)
    bos = tokenizer.bos_token_id
    others = [number for number, ids in enumerate(bare) if bos is not None and ids[:1] != [bos]]
    # One text tells for all whether the tokenizer begins them: it does so by its settings, not by the text.
    # `add_special_tokens=True` is the default of a call, and adds what the tokenizer's settings say.
    if not others or tokenizer(texts[others[0]])["input_ids"][:1] != [bos]:
        return bare
    return [ids if ids[:1] == [bos] else [bos, *ids] for ids in bare]


def _bare(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    return list(tokenizer(list(texts), add_special_tokens=False)["input_ids"])


def _chat_ids(chats: Sequence[Any], tasks: Sequence[Task], tokenizer: Any, around: Template) -> list[list[int]]:
    """The token ids of chats that all continue their last message, or all do not."""
    import jinja2

    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{tasks[0].named}: the prompt is a chat, but the tokenizer has no chat template: use an instruction-tuned "
            "model, or make it text with data.template={text: 'Question: {prompt}\\nAnswer:'}"
        )
    continued = chats[0][-1]["role"] == "assistant"
    # An assistant's message at the end is the begin of the answer: its turn is left open and no new one begun.
    how = {"add_generation_prompt": not continued, "continue_final_message": continued, "return_dict": False}
    try:
        if around.assistant is None:
            return list(tokenizer.apply_chat_template(list(chats), tokenize=True, **{**around.options, **how}))
        # Not as a message that is continued: templates of thinking models rewrite the text of messages. Tokenised with
        # the rest, as a demonstration of the whole turn would be.
        texts = tokenizer.apply_chat_template(list(chats), tokenize=False, **{**around.options, **how})
        return _bare([text + around.assistant for text in texts], tokenizer)
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        # Slow, but only for an error: the batch says nothing of which chat it was.
        if len(chats) > 1:  # one of them is at fault: alone it is named
            alone = [_chat_ids([chat], [task], tokenizer, around) for chat, task in zip(chats, tasks, strict=True)]
            return [ids for (ids,) in alone]
        raise DataError(
            f"{tasks[0].named}: the chat template cannot render the prompt: {type(error).__name__}: {error}"
        ) from error


def _wrapped(messages: Messages, around: str) -> Messages:
    """The chat with `around` put round its last user message."""
    for index in reversed(range(len(messages))):
        if messages[index]["role"] == "user":
            content = around.replace(SLOT, _content(messages[index]))
            return [*messages[:index], {**messages[index], "content": content}, *messages[index + 1 :]]
    raise DataError("the template wraps the last user message, but the prompt has none")


def _joined(messages: Messages) -> str:
    for message in messages:
        if message["role"] not in ("system", "user"):
            raise DataError(
                f"a chat with a message of {message['role']!r} cannot be made text: template.text takes system and "
                "user messages"
            )
    return "\n\n".join(_content(message) for message in messages)


def _content(message: Mapping[str, Any]) -> str:
    if not isinstance(message["content"], str):
        raise DataError("a template goes round text, but the message's content is a list of parts")
    return message["content"]


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, ValueError) as error:
        raise DataError(
            f"the template {path[:80]!r} has no {SLOT} and cannot be read as a file in {Path.cwd()}: {error}"
        ) from error


def _with_slot(name: str, text: str) -> str:
    if SLOT not in text:
        raise DataError(f"{name} has no {SLOT}, where the prompt goes: {text[:80]!r}")
    return text
