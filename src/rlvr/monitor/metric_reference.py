"""The docs page of metrics, rendered from the registry: what is registered is what is documented."""

from __future__ import annotations

from rlvr.monitor.metrics import FAMILIES, METRICS, Metric

_HEAD = """# Metrics

One JSON object per step in `metrics.jsonl`, and the same names in every tracker. Every key below is always there, and
null when not computed. Shares are between 0 and 1, times are seconds, `loss/*`, `grad_norm` and `ratio/*` are averages
over the step's optimizer steps. *Healthy* is what an ordinary run looks like: a reason to look, not an alarm.

This page is generated from `rlvr.monitor.metrics`.
"""


_DEVICES = """
## How memory, MFU and idle time are measured

Nothing here makes the host wait for the GPU.

- `memory/*` is what torch's allocator counts in the trainer's process (`torch.cuda.max_memory_allocated`,
  `max_memory_reserved`), reset whenever the phase changes. A vLLM engine is a process of its own and not in it, nor
  are CUDA's context, NCCL and what other programs use. On a CPU there is none: the kernel's peak of a process cannot
  be reset for a phase without disturbing whoever else measures the process.
- `mfu/*` counts model FLOPs as PaLM (Chowdhery et al. 2022, appendix B), torchtitan and prime-rl do: 6 operations for
  each weight and token, 12 for each query, key and channel of attention without the saving of the causal mask; 4 for a
  frozen weight under an adapter. Of experts those count that are active for a token; a sliding window bounds the keys.
  Not counted are activations that are computed again, padding, passes before the update (rewards that need the model)
  and sampling. Passes of the update without a gradient (reference, proximal policy) count forward only, a shared
  prefix once, the LM head at trained tokens only; so the figure is lower than where each of these is counted in full.
  The peak is that of dense bfloat16 whatever the run computes in, from a table of known devices
  (`rlvr.policy.flops.PEAKS`); for others `mfu/*` is null and the run says so once.
- `gpu/idle` comes from the phases, as slime's `wait_time_ratio` does: in update and publish the GPU counts as working;
  in the others it works while the engine has an open request, and not at all where the engine samples on other devices
  (`vllm-server`). It is too low where a phase itself leaves the GPU waiting (for another rank, for the host) or a
  request waits for a tool, and too high where rewards are computed with the model. `nvidia-smi dmon` and
  `logging.profile` look closer.
- `time/*_per_device` divide by the ranks that train. Devices that servers use beside them are not counted.
"""


def metrics_page() -> str:
    """The registry as a Markdown page: one table of keys, one of families."""
    families = "\n## Families\n\nKeys that are there when something computes them.\n"
    return "\n".join([_HEAD, _table(METRICS), _DEVICES, families, _table(FAMILIES)]) + "\n"


def _table(metrics: dict[str, Metric]) -> str:
    rows = [f"| `{m.name}` | {m.unit} | {m.description} | {m.healthy} |" for m in metrics.values()]
    return "\n".join(["| key | unit | what it says | healthy |", "|---|---|---|---|", *rows])
