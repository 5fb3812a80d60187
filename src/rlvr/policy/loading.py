"""From the `model` section to a Policy: weights loaded or built, values of its config.json replaced
(`model.override_config`), adapter put on, tokenizer beside it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from rlvr import registry
from rlvr.config import FrozenModelConfig, ModelConfig
from rlvr.core.hub_retries import without_retry_lines
from rlvr.core.startup_lines import startup
from rlvr.errors import ConfigError, nearest
from rlvr.policy.adapters import add_adapter, is_adapter
from rlvr.policy.compiled_layers import compile_layers
from rlvr.policy.foreign import foreign
from rlvr.policy.fused_layers import fuse_layers
from rlvr.policy.grouped_experts import autocast_experts
from rlvr.policy.model import Policy, training_modules
from rlvr.policy.quantization import exact, has_quantized, quantizing
from rlvr.policy.scratch import build_model, build_tokenizer


def load_policy(config: ModelConfig, seed: int = 0, shared_out: bool = False, is_main: bool = True) -> Policy:
    """The model that `config` describes, in evaluation mode on its device.

    With `shared_out`, one whose weights ranks are going to share out among them: they wait in host memory, and where
    not `is_main` only their shapes are there, which take no memory. ConfigError names a path that does not exist, a
    folder without a model, or a section that says nothing.
    """
    startup.info("loading the model %s", config.path or "from random weights")
    # Before anything is loaded: libraries allocate on the current device, and each rank has another one.
    make_current(device_of(config))
    empty = shared_out and not is_main
    if shared_out and config.quantization is not None:
        raise ConfigError(
            "model.quantization does not go with distributed.zero_stage 3, which shares weights out: use 2"
        )
    if shared_out and config.compile:
        raise ConfigError(
            "model.compile does not go with distributed.zero_stage 3, which gathers weights in hooks: use 2"
        )
    # Weights that train stay in float32; those frozen under an adapter take the type computed in.
    if config.adapter is None:
        dtype = torch.float32
    else:
        dtype = dtype_of(config)
    if config.scratch is not None:
        tokenizer: Any = build_tokenizer(config.scratch)
        # Buffers (rotary frequencies) are not in a checkpoint and are made for real on every rank.
        with init_empty_weights(include_buffers=False) if empty else contextlib.nullcontext():
            model: Any = build_model(config.scratch, tokenizer, seed, config.attention)
            model = model.to(dtype)
    elif config.path is not None:
        model, tokenizer = _from_pretrained(config, dtype, empty)
    else:
        raise ConfigError("the config says no model: set model.path to a folder or hub name, or model.scratch")
    if any(parameter.is_meta for parameter in model.parameters()):
        # Expanded from one element: the right shape in host memory, of which it takes none.
        model = model._apply(lambda t: torch.empty((), dtype=t.dtype).expand(t.shape) if t.is_meta else t)
        model.tie_weights()
    return make_policy(model if shared_out else model.to(device_of(config)), tokenizer, config, seed)


def given_policy(
    model: Any, tokenizer: PreTrainedTokenizerBase | None, config: ModelConfig, seed: int = 0, shared_out: bool = False
) -> Policy:
    """A Policy round a model that the user loaded, moved to the configured device, where not `shared_out` among ranks.

    ConfigError for a model that cannot be moved there, or of which nothing would be trained.
    """
    make_current(device_of(config))
    policy = make_policy(
        model if shared_out else _placed(model, device_of(config)), tokenizer or tokenizer_of(model), config, seed
    )
    if policy.trainable():
        return policy
    if is_adapter(model):
        raise ConfigError(
            "nothing of the model is trainable: its adapter was loaded for inference. Load it with "
            "PeftModel.from_pretrained(base, path, is_trainable=True), or give the path as model.path with "
            "model.adapter set"
        )
    raise ConfigError(
        "nothing of the model is trainable: no parameter requires a gradient. Call model.requires_grad_(True), or set "
        "model.adapter to train an adapter on it"
    )


def _placed(model: Any, device: torch.device) -> Any:
    """The model on `device`. ConfigError says why it cannot be moved there and what to do."""
    devices = {parameter.device for parameter in model.parameters()}
    # A user's `with torch.device("meta")`, or a model that accelerate dispatched to disk.
    if any(one.type == "meta" for one in devices):
        raise ConfigError("the model that was given has no weights (they are on the device `meta`): load them first")
    # accelerate notes in `hf_device_map` where it put the parts of a model that was loaded with a device_map.
    parts = {str(part) for part in (foreign(model, "hf_device_map") or {}).values()}
    if len(devices) > 1 or len(parts) > 1:
        raise ConfigError(
            f"the model that was given is spread over {', '.join(sorted(parts or map(str, devices)))} (device_map): "
            "load it without device_map, or onto one device; distributed.zero_stage 3 shares a large model out among "
            "ranks"
        )
    # All parameters are on one device by now.
    here = next(iter(devices))
    if here.type == device.type and device.index in (None, here.index):
        return model
    if foreign(model, "is_quantized", False) or has_quantized(model):
        raise ConfigError(
            f"the model that was given is quantized and lies on {here}, while model.device means {device}: load it "
            f"there (device_map={{'': '{device}'}}), or set model.device to {here}"
        )
    return model.to(device)


def make_policy(model: Any, tokenizer: PreTrainedTokenizerBase, config: ModelConfig, seed: int = 0) -> Policy:
    """A Policy round a loaded model: adapter, gradient checkpointing, kernels, compiled layers, offload, pad token and
    evaluation mode as `config` says.

    Weights that train are made float32 in place, whatever they were loaded in.
    """
    if tokenizer.pad_token_id is None:
        # Any id will do: padding is on the right or masked, and no token sees it.
        tokenizer.pad_token = tokenizer.eos_token
    if config.adapter is not None and not is_adapter(model):
        model = add_adapter(model, config.adapter, seed)
    if config.quantization is not None:
        exact(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            # bfloat16 has 8 bits of precision, so an update below 0.2 % of a weight would round to nothing. Passes
            # compute in `dtype` by autocast.
            parameter.data = parameter.data.float()
    if config.checkpoints_activations:  # a model that was given may recompute already, and goes on
        set_checkpointing(model, True)
    adapter_dropout = config.adapter is not None and config.adapter.dropout > 0
    policy = Policy(model.eval(), tokenizer, dtype_of(config), adapter_dropout, device_of(config))
    _keep_soft_cap(policy.causal_lm, config.attention)
    autocast_experts(policy.causal_lm)
    fuse_layers(policy, config.fused_layers)
    if config.compile:
        compile_layers(policy.causal_lm)
    if config.activation_offload:
        offload_activations(policy.causal_lm.base_model)
    return policy


def set_checkpointing(model: Any, on: bool) -> None:
    """Recompute activations in the backward pass, or keep them."""
    if not on:
        model.gradient_checkpointing_disable()
        return
    # The reentrant kind needs inputs that require a gradient, which token ids never do under a frozen embedding (LoRA).
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    disable_own_dropout(model)


def disable_own_dropout(model: torch.nn.Module) -> None:
    """Set the probabilities of dropout and LayerDrop to 0 that modules which checkpoint apply themselves, by a
    function.

    Such modules keep them as numbers (OPT: `dropout`, `layerdrop`; Starcoder2: `embedding_dropout`) or read them from
    the configuration (Falcon); the latter get a copy of it, for the model's own is saved with the weights.
    """
    for module in training_modules(model, adapter_dropout=False):
        _zero(module)
        if isinstance(module, GradientCheckpointingLayer) and "config" in vars(module):
            config = copy.copy(module.config)
            _zero(config)
            module.config = config


def _zero(owner: Any) -> None:
    """Set every number in the attributes of `owner` to 0 whose name says that it is a probability of dropout."""
    for name, value in list(vars(owner).items()):
        # Names such as `dropout`, `attention_dropout` and `layerdrop`. Modules of nn.Dropout are no floats: evaluation
        # mode has turned these off.
        if "drop" in name and isinstance(value, float):
            setattr(owner, name, 0.0)


def _keep_soft_cap(model: Any, attention: str | None) -> None:
    """Take eager attention for a model with an attention soft-cap that was loaded with sdpa, which leaves the cap out.

    transformers' `sdpa_attention_forward` ignores `softcap`, without a word, and is its default for Gemma 2 and
    VaultGemma (transformers 5.19); eager, flex_attention and flash_attention_2 apply it. ConfigError where `asked` is
    sdpa.
    """
    cap = foreign(model.config.get_text_config(), "attn_logit_softcapping")
    if cap is None or model.config._attn_implementation != "sdpa":
        return
    if attention == "sdpa":
        raise ConfigError(
            f"model.attention: sdpa leaves out the attention soft-cap of the model (attn_logit_softcapping is {cap}): "
            "use eager, flex_attention or flash_attention_2, or null, which is eager here"
        )
    model.set_attn_implementation("eager")


def tokenizer_of(model: Any) -> PreTrainedTokenizerBase:
    """The tokenizer from where a loaded model came from. ConfigError when the model does not say."""
    path = foreign(model, "name_or_path", "") or foreign(model.config, "_name_or_path", "")
    if not path:
        raise ConfigError("the model came without a tokenizer and does not say where it is from: pass tokenizer=")
    return AutoTokenizer.from_pretrained(path)


def device_of(config: ModelConfig | FrozenModelConfig, key: str = "model") -> torch.device:
    """Return the device for the model under `key`. ConfigError when a GPU is asked for and there is none."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(config, key)
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{key}.device is {config.device!r}, but torch sees no GPU: use `auto` or `cpu`")
    return device


def check_device(config: ModelConfig | FrozenModelConfig, key: str = "model") -> None:
    """ConfigError where the device of the model under `key` is none that torch knows; it may be on another machine."""
    if config.device == "auto":
        return
    try:
        torch.device(config.device)
    except RuntimeError as error:
        raise ConfigError(f"{key}.device {config.device!r} is no device: {error}") from error


def make_current(device: torch.device) -> None:
    """Make a GPU the one that this thread computes on: libraries ask for the current device (vLLM's sender of weights,
    NCCL)."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def dtype_of(config: ModelConfig | FrozenModelConfig) -> torch.dtype:
    """The type computed in."""
    if config.dtype == "auto":
        if device_of(config).type == "cuda":
            return torch.bfloat16
        return torch.float32
    return getattr(torch, config.dtype)


@without_retry_lines()
def _from_pretrained(
    config: ModelConfig, dtype: torch.dtype, empty: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    path = str(config.path)
    where, local = located("model.path", path)
    folder = Path(where)
    more = {"revision": config.revision, "trust_remote_code": config.trust_remote_code, "local_files_only": local}
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **more)
        if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
            raise ValueError("it has no tokenizer files")  # transformers then makes an empty tokenizer
        if (folder / "adapter_config.json").is_file():
            if config.override_config:
                raise ConfigError(
                    f"model.override_config: {path} is an adapter, whose base comes with its own configuration: "
                    "merge it first (python -m rlvr.merge)"
                )
            from peft import AutoPeftModelForCausalLM

            adapted = AutoPeftModelForCausalLM.from_pretrained(
                where, dtype=dtype, is_trainable=config.adapter is not None, **_quantized(config)
            )
            if config.adapter is None:  # peft has frozen the base
                return adapted.merge_and_unload().requires_grad_(True), tokenizer
            return adapted, tokenizer
        wanted = {"dtype": dtype, "attn_implementation": config.attention, **_quantized(config)}
        described = override_config(AutoConfig.from_pretrained(where, **more), config.override_config)
        if empty:
            return _shape(where, described, wanted, more), tokenizer
        model = AutoModelForCausalLM.from_pretrained(where, config=described, **wanted, **more)
    # What from_pretrained raises for missing or torn files, unknown architectures, missing packages and shapes that
    # differ.
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        kind = "folder" if local else "hub model"
        here = "" if local else ", and there is no folder of this name here"
        raise ConfigError(f"model.path: the {kind} {path!r} cannot be loaded{here}: {error}") from error
    return model, tokenizer


def located(key: str, path: str) -> tuple[str, bool]:
    """The place of the model of the key `key`, for transformers, and True if that is a folder here.

    ConfigError for a folder that is not there or has no model.
    """
    registry.refuse_words(key, path)
    folder = Path(path).expanduser()
    # A missing "./model" or "runs/a/b" is a mistyped folder, not a hub name: asking the hub would give an error about
    # names.
    local = folder.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1
    if local and not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        lacking = "no config.json" if folder.exists() else "no such folder"
        raise ConfigError(
            f"{key}: there is no model in {folder.resolve()} ({lacking}; a hub name has the form owner/name)"
        )
    return (str(folder) if local else path), local


def _quantized(config: ModelConfig) -> dict[str, Any]:
    """Return the arguments that load the weights in 4 bits, on their device; none where that is not asked for."""
    if config.quantization is None:
        return {}
    return {"quantization_config": quantizing(dtype_of(config)), "device_map": {"": device_of(config)}}


def _shape(where: str, described: Any, wanted: dict[str, Any], more: dict[str, Any]) -> PreTrainedModel:
    """The model in `where` without weights."""
    trust = more["trust_remote_code"]
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(described, trust_remote_code=trust, **wanted)
    with contextlib.suppress(OSError):  # it has none of its own
        model.generation_config = GenerationConfig.from_pretrained(where, **more)
    return model


def offload_activations(decoder: torch.nn.Module) -> None:
    """From now on, forward passes of `decoder` keep their tensors in (pinned) host memory until the backward pass.

    Goes with gradient checkpointing, whose layers keep nothing but their inputs: these are what is copied, and no
    weight is. Where gradients are off (sampling, a reference) nothing is kept and nothing is copied.
    """
    opened: list[Any] = []

    def begin(*_: Any) -> None:
        if torch.is_grad_enabled():
            # Pinned memory lets copies run beside the computation; it needs CUDA.
            opened.append(torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()))
            opened[-1].__enter__()

    def end(*_: Any) -> None:
        if torch.is_grad_enabled():
            opened.pop().__exit__(None, None, None)

    decoder.register_forward_pre_hook(begin)
    # Also after an exception: saved-tensor hooks that stay open would copy everything that comes later.
    decoder.register_forward_hook(end, always_call=True)


def override_config(config: Any, overrides: Mapping[str, Any], name: str = "model.override_config") -> Any:
    """`config`, a transformers configuration, with the values of `overrides` in place of its own.

    A mapping (`rope_parameters`) is merged into the one that is there. Of a model of several parts (text and vision)
    the text part is changed. ConfigError names a key that the configuration lacks.
    """
    text = config.get_text_config()
    for key, value in overrides.items():
        setattr(text, key, _merged(_own(text, key, name), value, f"{name}.{key}"))
    return config


def _own(config: Any, key: str, name: str) -> Any:
    values = config.to_dict()
    if key in values:
        return values[key]
    # Where transformers before version 5 had it, and config.json files have it still.
    if key in (values.get("rope_parameters") or {}):
        raise ConfigError(
            f"{name}.{key}: transformers keeps it in rope_parameters: write rope_parameters: {{{key}: ...}}"
        )
    raise ConfigError(f"{name}: a model of type {config.model_type!r} has no {key!r}{nearest(key, list(values))}")


def _merged(own: Any, value: Any, name: str) -> Any:
    if not isinstance(own, Mapping):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is a mapping: it cannot become {value!r}")
    # A key that is new is right here: `factor` comes with another rope_type.
    return {**own, **{key: _merged(own.get(key), inner, f"{name}.{key}") for key, inner in value.items()}}
