"""A character tokenizer made from scratch: no hub, no files."""

import string

import pytest

CHAT_TEMPLATE = (
    "{% if style %}[{{ style }}]{% endif %}"
    "{% for message in messages %}<{{ message.role[0] }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="session")
def make_tokenizer():
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def make(adds_bos=False, adds_eos=False, chat=True, bos=True, eos=True):
        special = ["<bos>", "<end>", "<unk>", "<s>", "<u>", "<a>"]
        vocabulary = {token: i for i, token in enumerate([*special, *string.printable])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
        if adds_bos or adds_eos:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=("<bos> " if adds_bos else "") + "$A" + (" <end>" if adds_eos else ""),
                special_tokens=[("<bos>", 0), ("<end>", 1)],
            )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<bos>" if bos else None,
            eos_token="<end>" if eos else None,
            unk_token="<unk>",
            chat_template=CHAT_TEMPLATE if chat else None,
        )

    return make


@pytest.fixture
def tokenizer(make_tokenizer):
    return make_tokenizer()
