"""`model.override_config`: values of a model's config.json that the run replaces."""

import json

import pytest
import torch

from rlvr.config import LoraConfig, ModelConfig, ScratchConfig
from rlvr.errors import ConfigError
from rlvr.planner import shape_of
from rlvr.policy import load_policy

LONGER = {"max_position_embeddings": 128, "rope_parameters": {"rope_theta": 1.0e6}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a context of 64 tokens."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    scratch = ScratchConfig(hidden_size=16, heads=2, kv_heads=1, intermediate_size=32, context=64, init_std=0.3)
    policy = load_policy(ModelConfig(scratch=scratch, device="cpu"), seed=0)
    policy.model.save_pretrained(path)
    policy.tokenizer.save_pretrained(path)
    return path


def loaded(folder, **options):
    return load_policy(ModelConfig(path=str(folder), device="cpu", **options))


def logits(policy, length=40):
    ids = torch.arange(length)[None] % 90
    with torch.no_grad():
        return policy.causal_lm(ids).logits[0].double()


def test_context_and_rotary_embedding_are_those_of_the_run(folder):
    own, longer = loaded(folder), loaded(folder, override_config=LONGER)
    assert (own.context, longer.context) == (64, 128)
    # Frequencies theta^(-2i/d), by hand for a head of 8 numbers.
    wanted = torch.tensor([1.0e6 ** (-2 * i / 8) for i in range(4)])
    torch.testing.assert_close(longer.causal_lm.model.rotary_emb.inv_freq, wanted)
    # The same weights; another rotation from the second token on.
    assert torch.equal(logits(own)[0], logits(longer)[0])
    assert not torch.allclose(logits(own)[1:], logits(longer)[1:])


def test_other_values_of_a_mapping_stay(folder):
    text = loaded(folder, override_config=LONGER).causal_lm.config
    assert text.rope_parameters == {"rope_theta": 1.0e6, "rope_type": "default"}


def test_a_checkpoint_and_the_folder_for_vllm_have_them(folder, tmp_path):
    policy = loaded(folder, override_config=LONGER)
    policy.model.save_pretrained(tmp_path / "checkpoint")
    policy.describe(tmp_path / "described")
    for name in ("checkpoint", "described"):
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert written["max_position_embeddings"] == 128
        assert written["rope_parameters"]["rope_theta"] == 1.0e6
    policy.tokenizer.save_pretrained(tmp_path / "checkpoint")
    assert torch.equal(logits(loaded(tmp_path / "checkpoint")), logits(policy))


def test_the_memory_plan_has_the_context(folder):
    assert shape_of(ModelConfig(path=str(folder), override_config=LONGER)).context == 128


def test_a_long_context_by_yarn(folder):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    policy = loaded(folder, override_config={"max_position_embeddings": 256, "rope_parameters": yarn})
    assert policy.context == 256
    assert logits(policy, 200).isfinite().all()


def test_nothing_is_changed_without_it(folder):
    assert torch.equal(logits(loaded(folder)), logits(loaded(folder, override_config={})))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_position_embedings": 128}, r"'qwen3' has no 'max_position_embedings'; did you mean 'max_position_emb"),
        ({"rope_theta": 1e6}, r"override_config.rope_theta: .*: write rope_parameters: \{rope_theta: ...\}"),
        ({"rope_parameters": 1e6}, r"override_config.rope_parameters is a mapping: it cannot become 1000000.0"),
    ],
)
def test_what_the_model_does_not_have_is_refused(folder, overrides, message):
    with pytest.raises(ConfigError, match=message):
        loaded(folder, override_config=overrides)


def test_an_adapter_and_a_scratch_model_are_refused(folder, tmp_path):
    loaded(folder, adapter=LoraConfig(r=2)).model.save_pretrained(tmp_path / "adapter")
    loaded(folder).tokenizer.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"adapter, whose base .*: merge it first"):
        loaded(tmp_path / "adapter", override_config=LONGER)
    with pytest.raises(ValueError, match="`override_config` is for a model that is loaded"):
        ModelConfig(scratch=ScratchConfig(), override_config=LONGER)
