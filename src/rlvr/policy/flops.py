"""Floating-point operations that a policy's passes need, and the most that known GPUs do in a second.

What is counted is what model FLOPs utilisation (MFU) counts (Chowdhery et al. 2022, "PaLM", appendix B): 2 operations
for each weight that a token is multiplied by, as many again for the gradient of its input, as many again for the
gradient of a weight that is trained; 4 for each query, key and channel of attention, twice as many in the backward
pass, without the saving of causal masks, as PaLM, torchtitan and prime-rl count. Activations that are computed again,
by gradient checkpointing or in the LM head, are not counted. Each token is counted where it is computed: padding never,
a shared prefix once, the LM head at trained tokens only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlvr.policy.foreign import foreign
from rlvr.policy.layer_sizes import attention_windows
from rlvr.policy.microbatch import ComputedPass
from rlvr.policy.model import Policy
from rlvr.policy.quantization import dense_shape

# The first row with a name whose words are all in the device's name counts, so variants stand before the plain name.
PEAKS: tuple[tuple[float, tuple[str, ...]], ...] = (
    (2500e12, ("GB200",)),
    (2250e12, ("B200",)),
    (835e12, ("H200 NVL", "H100 NVL")),
    (756e12, ("H100 PCIe", "H800 PCIe")),
    (989e12, ("GH200", "H200", "H100", "H800")),
    (148e12, ("H20",)),
    (312e12, ("A100", "A800")),
    (362e12, ("L40S",)),
    (181e12, ("L40",)),
    (119.5e12, ("L20",)),
    (121e12, ("L4",)),
    (149.7e12, ("A40",)),
    (165e12, ("A30",)),
    (125e12, ("A10",)),
    (165.2e12, ("RTX 4090",)),
    (71e12, ("RTX 3090",)),
    (1307.4e12, ("MI300X", "MI325X")),
)
"""(FLOP/s, words of the name of each device that has them). FLOP/s are of dense bfloat16 matrix products with sums in
float32. From the vendors' data sheets, where the numbers with sparsity are twice these; as in torchtitan's
tools/utils.py, prime-rl's trainer/perf.py and verl's utils/flops_counter.py, and for the RTX cards NVIDIA's white
papers of the Ada and Ampere (GA102) architectures. H200 NVL: the H200 data sheet (1,671 with sparsity); L4 and A10:
Lightning Fabric's utilities/throughput.py, after the Ada white paper and the A10 data sheet; A30: its product page (330
with sparsity); H800 PCIe: an H100 PCIe whose links between GPUs are slower."""
OTHER_DEVICES = frozenset({"Laptop", "MIG", "D", "Ti", "Max-Q"})
"""Words of a name that make it a slower or smaller device than the one that the other words name."""


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of dense bfloat16 that a device can do, by its name as CUDA gives it; None for one that is not known."""
    words = set(device_name.replace("-", " ").split())
    if words & OTHER_DEVICES:
        return None
    return next((peak for peak, names in PEAKS for name in names if words.issuperset(name.split())), None)


@dataclass(frozen=True)
class UpdateFlops:
    """FLOPs of the passes of an update on a rank."""

    flops: float
    """Operations of all passes, as MFU counts them."""
    tokens: int
    """Tokens of the passes that have a gradient, prompts included."""


@dataclass(frozen=True)
class ModelFlops:
    """The sizes of a model that the operations of its passes follow from."""

    weights: float
    """Weights of the decoder that a token is multiplied by; of experts, those that are active for a token."""
    trained: float
    """Those among them that are trained."""
    head: float
    """Weights of the LM head."""
    trained_head: float
    channels: float
    """Query channels of an attention layer, all heads together; the mean of keys' and values' where they differ."""
    windows: tuple[float, ...]
    """For each attention layer, the tokens that a query sees at most."""

    @classmethod
    def of(cls, policy: Policy) -> ModelFlops:
        """From the policy's parameters and configuration."""
        model = policy.causal_lm
        config = model.config.get_text_config()
        looked_up = model.get_input_embeddings().weight
        head = model.get_output_embeddings()
        of_head = [] if head is None else list(head.parameters())
        counted = {id(p) for p in [looked_up, *of_head]}
        # A token is multiplied by num_experts_per_tok of the routed experts; which ones does not matter for the count.
        active = _active_share(config)
        decoder = [
            (_size(p) * (active if ".experts." in name else 1.0), p.requires_grad)
            for name, p in model.base_model.named_parameters()
            if id(p) not in counted
        ]
        heads = foreign(config, "num_attention_heads", 0)  # a model may have no attention
        size = foreign(config, "head_dim") or config.hidden_size // max(1, heads)
        of_keys = foreign(config, "qk_head_dim") or size
        of_values = foreign(config, "v_head_dim") or of_keys
        return cls(
            weights=sum(count for count, _ in decoder),
            trained=sum(count for count, trained in decoder if trained),
            head=sum(map(_size, of_head)),
            trained_head=sum(_size(p) for p in of_head if p.requires_grad),
            # q k^T needs 2 FLOPs for each key channel of a pair, the product with v 2 for each value channel: 4 x their
            # mean.
            channels=heads * (of_keys + of_values) / 2,
            windows=attention_windows(config),
        )

    def of_pass(self, computed: ComputedPass) -> float:
        """Operations of a forward pass over a micro-batch, with the backward pass where it has a gradient."""
        length = computed.length
        projected = computed.projected
        tokens = float(length.sum())
        # A multiplication and an addition for each weight and token.
        dense = 2 * (self.weights * tokens + self.head * projected)
        # int64 [S]: keys that a run's queries are counted with, causal or not, as PaLM counts them.
        seen = length + computed.context
        pairs = sum(float((length * np.minimum(seen, window)).sum()) for window in self.windows)
        attention = 4 * self.channels * pairs
        if not computed.grad:
            return dense + attention
        # Gradients of weights, of those that are trained only: with LoRA the base has none.
        of_weights = 2 * (self.trained * tokens + self.trained_head * projected)
        # Forward and gradient of the inputs: 2 x dense. Attention has four products in the backward pass against two in
        # the forward pass: 3 x in all.
        return 2 * dense + of_weights + 3 * attention

    def of_update(self, passes: Iterable[ComputedPass]) -> UpdateFlops:
        """The operations of the passes of an update."""
        flops = 0.0
        tokens = 0
        for computed in passes:
            flops += self.of_pass(computed)
            tokens += int(computed.length.sum()) if computed.grad else 0
        return UpdateFlops(flops, tokens)


def _size(parameter: torch.nn.Parameter) -> int:
    """The numbers of a whole weight, whatever part or form of it is here."""
    return int(foreign(parameter, "ds_numel", dense_shape(parameter, parameter.shape).numel()))


def _active_share(config: Any) -> float:
    """The share of the routed experts that a token is multiplied by."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    total = next((count for name in names if (count := foreign(config, name))), None)
    active = foreign(config, "num_experts_per_tok")
    return active / total if total and active else 1.0
