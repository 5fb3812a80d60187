"""vLLM behind the Engine protocol: an engine owned by the run (`vllm`) and servers (`vllm-server`).

Nothing here imports vLLM in the trainer's process unless a GPU transfer needs it. The trainer's side: options,
model_folder, requests, engine (with host, the other end of its pipe), servers. Started processes: process (an engine),
serve (a server), both ended with their owner by parent_death. Weights: transfer sends them, receiver takes them inside
vLLM's workers.
"""

from rlvr.rollout.vllm.options import VLLMOptions, VLLMServerOptions

__all__ = ["VLLMOptions", "VLLMServerOptions"]
