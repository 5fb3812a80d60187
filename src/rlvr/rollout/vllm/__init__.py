"""vLLM behind the Engine protocol: an engine owned by the run (`vllm`) and servers (`vllm-server`).

Nothing here imports vLLM in the trainer's process unless a GPU transfer needs it. The trainer's side: options,
model_folder, requests, embedded_engine (with host, the trainer's end of its pipe), server_engine (with members, client
and started). Started processes: engine_process and serve, both ended with their owner (rlvr.core.process.parent_death).
Weights: transfer and gpu_transfer send them, receiver takes them inside vLLM's workers.
"""

from rlvr.rollout.vllm.options import VLLMOptions, VLLMServerOptions

__all__ = ["VLLMOptions", "VLLMServerOptions"]
