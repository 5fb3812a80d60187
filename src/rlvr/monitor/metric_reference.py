"""The docs page of metrics, rendered from the registry: what is registered is what is documented."""

from __future__ import annotations

from rlvr.monitor.metrics import FAMILIES, METRICS, Metric

_HEAD = """# Metrics

This page lists every number that a step reports. `pandas.read_json("runs/NAME/metrics.jsonl", lines=True)` reads them.

Each step writes one JSON object to `metrics.jsonl`, and the same names to every tracker. Every key below is always
present, and null when not computed. Shares are between 0 and 1, times are in seconds. `loss/*`, `grad_norm` and
`ratio/*` are averages over the step's optimizer steps. *Healthy* is the value in an ordinary run: another value
is a reason to look, not an alarm.

This page is generated from `rlvr.monitor.metrics`.
"""


_DEVICES = """
## How memory, MFU and idle time are measured

Nothing here makes the host wait for the GPU.

- `memory/*` is what torch's allocator counts in the trainer's process (`torch.cuda.max_memory_allocated`,
  `max_memory_reserved`), reset whenever the phase changes. It does not include a vLLM engine, which is a process of its
  own, nor CUDA's context, NCCL and other programs. On a CPU it is null: the kernel's peak of a process cannot
  be reset for a phase without disturbing other programs that measure the process.
- `mfu/*` counts model FLOPs as PaLM (Chowdhery et al. 2022, appendix B), torchtitan and prime-rl do: 6 operations for
  each weight and token, 12 for each query, key and channel of attention without the saving of the causal mask; 4 for a
  frozen weight under an adapter. Only experts that are active for a token count; a sliding window bounds the keys.
  Not counted are activations that are computed again, padding, passes before the update (rewards that need the model)
  and sampling. Passes of the update without a gradient (reference, proximal policy) count forward only, a shared
  prefix once, the LM head at trained tokens only; so the figure is lower than where each of these is counted in full.
  The peak is that of dense bfloat16 for every dtype of the run, from a table of known devices
  (`rlvr.policy.flops.PEAKS`); for others `mfu/*` is null and the log has one warning.
- `gpu/idle` comes from the phases, as slime's `wait_time_ratio` does: in update and publish the GPU counts as working;
  in the others it works while the engine has an open request, and not at all where the engine samples on other devices
  (`vllm-server`). It is too low if the GPU waits within a phase (for another rank, for the host) or a
  request waits for a tool, and too high if rewards are computed with the model. `nvidia-smi dmon` and
  `logging.profile` give more detail.
- `time/*_per_device` divide by the ranks that train. Devices that servers use beside them are not counted.
"""


def metrics_page() -> str:
    """The registry as a Markdown page: one table of keys, one of families."""
    families = "\n## Families\n\nKeys that are present when a component computes them.\n"
    return "\n".join([_HEAD, _table(METRICS), _DEVICES, families, _table(FAMILIES)]) + "\n"


def _table(metrics: dict[str, Metric]) -> str:
    rows = [f"| `{m.name}` | {m.unit} | {m.description} | {m.healthy} |" for m in metrics.values()]
    return "\n".join(["| key | unit | meaning | healthy |", "|---|---|---|---|", *rows])
