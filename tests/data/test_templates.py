"""Prompts and demonstrations as token ids: nothing added, nothing lost, nothing tokenised twice."""

import pytest

from rlvr.data import Template, render_demonstration, render_prompt
from rlvr.errors import DataError
from rlvr.records import Task

CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi {x}"}]


def text(tokenizer, prompt, template=None):
    return tokenizer.decode(render_prompt(Task("t", prompt), tokenizer, template))


def test_a_text_prompt_is_verbatim(tokenizer):
    assert text(tokenizer, " 2+2 =\n") == " 2+2 =\n"


def test_bos_is_added_where_the_tokenizer_adds_it_never_twice_and_eos_never(make_tokenizer):
    assert text(make_tokenizer(adds_bos=True), "2+2") == "<bos>2+2"
    assert text(make_tokenizer(adds_bos=True), "<bos>2+2") == "<bos>2+2"
    assert text(make_tokenizer(adds_bos=True, adds_eos=True), "2+2") == "<bos>2+2"
    assert text(make_tokenizer(adds_eos=True, bos=False), "2+2") == "2+2"


def test_messages_go_through_the_chat_template_once(make_tokenizer):
    assert text(make_tokenizer(adds_bos=True), CHAT) == "<s>S<end><u>hi {x}<end><a>"


def test_a_last_assistant_message_is_continued(tokenizer):
    assert text(tokenizer, [*CHAT, {"role": "assistant", "content": "So"}]) == "<s>S<end><u>hi {x}<end><a>So"


def test_a_text_template_wraps_text_and_the_last_user_message(tokenizer, tmp_path):
    inline = "Q: {prompt} {json}\nA:"
    file = tmp_path / "template.txt"
    file.write_text(inline + "\n")
    for template in (inline, str(file), Template.parse(inline)):
        assert text(tokenizer, "{1}", template) == "Q: {1} {json}\nA:"
        chat = [{"role": "user", "content": "old"}, {"role": "assistant", "content": "yes"}, *CHAT[1:]]
        assert text(tokenizer, chat, template) == "<u>old<end><a>yes<end><u>Q: hi {x} {json}\nA:<end><a>"
    assert chat[2]["content"] == "hi {x}"


def test_a_mapping_makes_text_a_chat(tokenizer):
    assert text(tokenizer, "1", {"system": "Be {brief}", "user": "Q {prompt}"}) == "<s>Be {brief}<end><u>Q 1<end><a>"
    assert text(tokenizer, "1", {"user": "{prompt}"}) == "<u>1<end><a>"
    assert text(tokenizer, "1", {"system": "S"}) == "<s>S<end><u>1<end><a>"


def test_a_mapping_replaces_the_system_message_and_wraps_the_user_message_of_a_chat(tokenizer):
    assert text(tokenizer, CHAT, {"system": "T", "user": "Q {prompt}"}) == "<s>T<end><u>Q hi {x}<end><a>"
    assert text(tokenizer, CHAT[1:], {"system": "T"}) == "<s>T<end><u>hi {x}<end><a>"


def test_a_mapping_with_text_makes_a_chat_text_for_base_models(make_tokenizer):
    base = make_tokenizer(chat=False)
    assert text(base, CHAT, {"text": "Q: {prompt}\nA:"}) == "Q: S\n\nhi {x}\nA:"
    assert text(base, "1", {"text": "Q: {prompt}\nA:"}) == "Q: 1\nA:"


def test_chat_makes_a_chat_of_text_and_leaves_a_chat(tokenizer):
    assert text(tokenizer, "1", "chat") == "<u>1<end><a>"
    assert text(tokenizer, CHAT, "chat") == text(tokenizer, CHAT)


def test_the_begin_of_the_answer_stands_behind_the_opened_turn(make_tokenizer):
    tokenizer = make_tokenizer(adds_bos=True, adds_eos=True)
    assert text(tokenizer, "1", {"assistant": "So\n"}) == "<u>1<end><a>So\n"
    assert text(tokenizer, CHAT, {"assistant": " a "}) == "<s>S<end><u>hi {x}<end><a> a "
    assert text(tokenizer, "1", {"user": "Q {prompt}", "system": "S", "assistant": "A:"}) == "<s>S<end><u>Q 1<end><a>A:"
    # A template of a thinking model rewrites messages of the assistant: the begin of an answer is none.
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ message.content }}", "{{ message.content | upper }}")
    assert text(tokenizer, "q", {"assistant": "so"}) == "<u>Q<end><a>so"


def test_options_reach_the_chat_template(tokenizer):
    assert text(tokenizer, CHAT[1:], {"options": {"style": "no"}}) == "[no]<u>hi {x}<end><a>"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("no slot here", "cannot be read as a file"),
        ({"usr": "{prompt}"}, "did you mean 'user'"),
        ({"user": "no slot"}, "template.user has no {prompt}"),
        ({"system": 3}, "template.system must be text"),
        ({"text": "{prompt}", "system": "S"}, "not both"),
        ({"text": "{prompt}", "assistant": "S"}, "not both"),
        ({"options": "x"}, "template.options"),
    ],
)
def test_bad_templates_are_refused(template, said):
    with pytest.raises(DataError) as caught:
        Template.parse(template)
    assert said in str(caught.value)


def test_what_cannot_be_rendered_names_the_task_and_the_mend(tokenizer, make_tokenizer):
    for prompt, template, with_chat, output in [
        (CHAT, None, False, ["no chat template", "data.template={text:"]),
        ([CHAT[0]], "Q {prompt}", True, ["last user message"]),
        ([{"role": "user", "content": [{"type": "image"}]}], "Q {prompt}", True, ["list of parts"]),
        ([*CHAT, {"role": "assistant", "content": "a"}], {"text": "{prompt}"}, True, ["'assistant'"]),
        ("", None, True, ["no tokens"]),
        ("q", "chat", False, ["no chat template", "data.template={text:"]),
        ([*CHAT, {"role": "assistant", "content": "a"}], {"assistant": "b"}, True, ["drop it, or template.assistant"]),
    ]:
        with pytest.raises(DataError) as caught:
            render_prompt(Task("t7", prompt), tokenizer if with_chat else make_tokenizer(chat=False), template)
        for part in ["task 't7'", *output]:
            assert part in str(caught.value)


def test_a_chat_template_that_refuses_the_roles_is_a_data_error(make_tokenizer):
    strict = make_tokenizer()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"task 't'.*roles must alternate"):
        render_prompt(Task("t", CHAT), strict)


def test_a_demonstration_is_its_own_tokens_and_the_end(make_tokenizer):
    for tokenizer in (make_tokenizer(), make_tokenizer(adds_bos=True, adds_eos=True)):
        task = Task("t", CHAT, demonstration="It is 4")
        ids = render_demonstration(task, tokenizer)
        assert tokenizer.decode(ids) == "It is 4<end>"
        assert tokenizer.decode(render_prompt(task, tokenizer) + ids) == "<s>S<end><u>hi {x}<end><a>It is 4<end>"
        assert tokenizer.decode(render_demonstration(Task("t", "p", demonstration="4<end>"), tokenizer)) == "4<end>"


def test_demonstrations_that_cannot_be_are_refused(make_tokenizer):
    with pytest.raises(DataError, match="'t' has no demonstration"):
        render_demonstration(Task("t", "p"), make_tokenizer())
    with pytest.raises(DataError, match="no end-of-sequence token"):
        render_demonstration(Task("t", "p", demonstration="4"), make_tokenizer(eos=False))
