"""Names of settings in TRL and verl, with ours: an unknown key that is one of them is answered with our key.

Sources: TRL 1.16, trl/trainer/grpo_config.py (`GRPOConfig`) and grpo_trainer.py; transformers 5.19, training_args.py
(`TrainingArguments`), which GRPOConfig extends; verl 0.9, verl/trainer/config/ppo_trainer.yaml and the files that it
includes. docs/from-trl.md and docs/from-verl.md explain the same keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# An answer is our key, with a value or an explanation behind it, or `no: ` and the reason.
_ONE_BATCH = (
    "rollout.prompts_per_step, in prompts where TRL counts completions, with optim.micro_batch_size or "
    "optim.micro_batch_tokens for the memory"
)
# TRL counts optimizer steps, of which a batch here has updates_per_batch x epochs_per_batch.
_BATCHES = "%s, in batches where TRL counts updates"
_ENGINE = "rollout.engine: {name: vllm, %s: ...}"
_SERVER = "rollout.engine: {name: vllm-server, urls: [http://HOST:PORT]}"
_HUB = "no: call trainer.push_to_hub(...) after training"
_LOADER = "no: tasks are read once, there is no data loader"
_DDP = "no: rlvr sums the gradients of ranks itself (the section distributed)"
_EVERY_STEP = "no: every step is logged, to metrics.jsonl"
_VESPO = "algorithm.loss: {name: vespo, %s: ...}"
_SOFT = "algorithm.loss: {name: clip, clip: soft, %s: ...}"
_ENTROPY = "algorithm.entropy: {metric: entropy, %s: ...}"
_CORRECTION = "algorithm.correction: {name: truncate or mask, %s: ...}"
_ADAM = "optim.optimizer: {name: adamw, %s: ...}"

TRL: dict[str, str] = {
    # arguments of GRPOTrainer
    "train_dataset": "data.train",
    "eval_dataset": "data.eval",
    "reward_funcs": "verifier, with further ones in verifiers and rewards",
    "reward_processing_classes": "no: reward models run behind a server, as the judges of docs/judges.md",
    "processing_class": "no: the tokenizer is the model's; GRPOTrainer takes another as `tokenizer`",
    "peft_config": "model.adapter",
    "quantization_config": "model.quantization",
    "callbacks": "no: they are an argument of GRPOTrainer, `callbacks`",
    "optimizers": "optim.optimizer, optim.schedule",
    "tools": "rollout.plan: {name: turns, environment: FILE.py:Name}",
    "environment_factory": "rollout.plan: {name: turns, environment: FILE.py:Name}",
    "rollout_func": "rollout.plan: FILE.py:name",
    "args": "no: its settings are keys of this configuration",
    "ref_model": "no: the reference is a snapshot of the policy (algorithm.kl)",
    "compute_metrics": "no: an evaluation has the verifier's scores; a callback is shown the results",
    # the run
    "output_dir": "run.dir and run.name",
    "overwrite_output_dir": "run.overwrite, which keeps the old run under another name",
    "run_name": "run.name",
    "max_steps": _BATCHES % "run.steps",
    "num_train_epochs": "run.epochs",
    "seed": "run.seed",
    "data_seed": "run.seed",
    "full_determinism": "no: runs on one machine repeat by themselves, from run.seed",
    "do_train": "no: call trainer.train()",
    "do_eval": "no: call trainer.evaluate()",
    "do_predict": "no: call trainer.evaluate()",
    "resume_from_checkpoint": "no: train(resume=...), or --resume",
    "ignore_data_skip": "no: a resumed run goes on with the draws that are left",
    "restore_callback_states_from_checkpoint": "no: a callback with a state_dict is restored",
    # optimizer
    "learning_rate": "optim.lr",
    "lr_scheduler_type": "optim.schedule",
    "lr_scheduler_kwargs": "optim.min_lr",
    "warmup_steps": "optim.warmup_steps",
    "warmup_ratio": "optim.warmup_steps, in steps: the ratio x run.steps",
    "max_grad_norm": "optim.max_grad_norm",
    "optim": "optim.optimizer",
    "optim_args": "optim.optimizer: {name: ..., option: value}",
    "optim_target_modules": "no: the optimizers that need it are not here",
    "weight_decay": _ADAM % "weight_decay",
    "adam_beta1": _ADAM % "betas",
    "adam_beta2": _ADAM % "betas",
    "adam_epsilon": _ADAM % "eps",
    "per_device_train_batch_size": _ONE_BATCH,
    "gradient_accumulation_steps": _ONE_BATCH,
    "auto_find_batch_size": "optim.micro_batch_tokens: auto",
    "average_tokens_across_devices": "no: averages are always over the whole step",
    "label_smoothing_factor": "no: the loss is that of the policy gradient",
    "neftune_noise_alpha": "no: rlvr adds no noise to embeddings",
    "torch_empty_cache_steps": "no: the memory plan leaves memory for the engine",
    # model
    "model_init_kwargs": "model.dtype, model.attention, model.revision and the other keys of model",
    "trust_remote_code": "model.trust_remote_code",
    "model_name_or_path": "model.path",
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attention",
    "bf16": "model.dtype",
    "fp16": "no: model.dtype is float32 or bfloat16",
    "bf16_full_eval": "no: evaluations are sampled as rollouts are",
    "fp16_full_eval": "no: evaluations are sampled as rollouts are",
    "tf32": "no: set torch.set_float32_matmul_precision",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "gradient_checkpointing_kwargs": "model.gradient_checkpointing",
    "torch_compile": "model.compile",
    "torch_compile_backend": "model.compile",
    "torch_compile_mode": "model.compile",
    "use_liger_kernel": "model.fused_layers",
    "liger_kernel_config": "model.fused_layers",
    "use_cache": "no: sampling always uses a cache, updates never",
    "use_cpu": "model.device: cpu",
    "cast_lm_head_to_fp32": "no: logits are always float32",
    "disable_dropout": "no: a model's own dropout is never active",
    "router_aux_loss_coef": "no: there is no loss of a router",
    # logging
    "logging_strategy": _EVERY_STEP,
    "logging_steps": _EVERY_STEP,
    "logging_first_step": _EVERY_STEP,
    "log_on_each_node": "no: rank 0 alone logs",
    "logging_nan_inf_filter": "no: a value that is not finite is null in metrics.jsonl",
    "include_num_input_tokens_seen": "no: every step reports its tokens",
    "log_level": "logging.console",
    "log_level_replica": "no: rank 0 alone logs",
    "disable_tqdm": "logging.console: plain",
    "report_to": "logging.wandb, logging.tensorboard, logging.mlflow",
    "logging_dir": "logging.tensorboard: {directory: ...}",
    "project": "logging.wandb: {project: ...}",
    "trackio_space_id": "no: a tracker of your own is an argument of GRPOTrainer, `trackers`",
    "trackio_bucket_id": "no: a tracker of your own is an argument of GRPOTrainer, `trackers`",
    "trackio_static_space_id": "no: a tracker of your own is an argument of GRPOTrainer, `trackers`",
    "log_completions": "logging.rollouts, logging.samples_every",
    "num_completions_to_print": "logging.samples_every",
    "log_unique_prompts": "no: logging.rollouts records all of them",
    "log_multimodal": "no: there are no images",
    "log_completions_hub_repo": "no: logging.rollouts writes them to the run folder",
    "skip_memory_metrics": "no: every step reports its memory",
    "debug": "logging.profile",
    # evaluation
    "eval_strategy": "evaluation.every",
    "eval_steps": _BATCHES % "evaluation.every",
    "eval_delay": "evaluation.at_start",
    "eval_on_start": "evaluation.at_start",
    "per_device_eval_batch_size": "no: an evaluation is sampled in blocks that fit",
    "prediction_loss_only": "no: an evaluation samples and verifies",
    "eval_do_concat_batches": "no: results are kept by task",
    "eval_use_gather_object": "no: rank 0 has the results",
    "eval_accumulation_steps": "no: an evaluation is sampled in blocks that fit",
    "include_for_metrics": "no: a verifier has the whole task",
    "batch_eval_metrics": "no: results are kept by task",
    "num_generations_eval": "evaluation.samples",
    # checkpoints
    "save_strategy": "checkpoint.every, checkpoint.minutes",
    "save_steps": _BATCHES % "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "save_only_model": "no: a checkpoint holds everything; its folder model/ is the model alone",
    "save_on_each_node": "no: a checkpoint is shared by all ranks",
    "enable_jit_checkpoint": "no: SIGTERM always saves a checkpoint",
    "load_best_model_at_end": "checkpoint.best",
    "metric_for_best_model": "checkpoint.best: {metric: ...}",
    "greater_is_better": "checkpoint.best: {metric: ..., mode: max or min}",
    "push_to_hub": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    # data
    "remove_unused_columns": "no: all columns are kept",
    "label_names": "data.fields",
    "dataset_name": "data.train",
    "max_length": "rollout.max_new_tokens for a response, data.max_prompt_tokens for a prompt",
    "shuffle_dataset": "data.sampler",
    "train_sampling_strategy": "data.sampler",
    "length_column_name": "no: rows are packed by their lengths",
    "chat_template_kwargs": "data.template: {options: {...}}",
    "max_prompt_length": "data.max_prompt_tokens",
    "dataloader_drop_last": _LOADER,
    "dataloader_num_workers": _LOADER,
    "dataloader_pin_memory": _LOADER,
    "dataloader_persistent_workers": _LOADER,
    "dataloader_prefetch_factor": _LOADER,
    "dataloader_multiprocessing_context": _LOADER,
    "dataloader_in_order": _LOADER,
    # ranks
    "accelerator_config": "distributed.backend",
    "parallelism_config": "distributed.backend",
    "ddp_find_unused_parameters": _DDP,
    "ddp_bucket_cap_mb": _DDP,
    "ddp_broadcast_buffers": _DDP,
    "ddp_static_graph": _DDP,
    "ddp_backend": _DDP,
    "ddp_timeout": "distributed.heartbeat_timeout",
    "fsdp": "distributed.zero_stage, with distributed.backend: deepspeed",
    "fsdp_config": "distributed.zero_stage, with distributed.backend: deepspeed",
    "deepspeed": "distributed.backend: deepspeed, distributed.deepspeed: FILE",
    "local_rank": "no: torchrun sets it",
    "ds3_gather_for_generation": "no: with ZeRO-3 the engine receives the weights in buckets",
    # sampling
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_new_tokens",
    "generation_batch_size": "rollout.prompts_per_step, times rollout.group_size",
    "steps_per_generation": "optim.updates_per_batch = steps_per_generation / gradient_accumulation_steps",
    "num_iterations": "optim.epochs_per_batch",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p, with algorithm.truncated_sampling: true",
    "top_k": "rollout.top_k, with algorithm.truncated_sampling: true",
    "min_p": "rollout.min_p, with algorithm.truncated_sampling: true",
    "repetition_penalty": "no: log-probs are those of the distribution that is trained",
    "generation_kwargs": "no: log-probs are those of the distribution that is trained",
    "max_tool_calling_iterations": "rollout.plan: {name: turns, turns: N}",
    "cache_implementation": "no: the hf engine has a cache of its own",
    "use_transformers_paged": "no: the hf engine batches continuously by itself",
    "use_transformers_continuous_batching": "no: the hf engine batches continuously by itself",
    "transformers_continuous_batching_config": "no: the hf engine batches continuously by itself",
    "pad_to_multiple_of": "no: rows are packed, not padded",
    # vLLM
    "use_vllm": "rollout.engine: vllm",
    "vllm_mode": "rollout.engine: vllm (colocate) or vllm-server (server)",
    "vllm_server_base_url": _SERVER,
    "vllm_server_host": _SERVER,
    "vllm_server_port": _SERVER,
    "vllm_server_timeout": "rollout.engine: {name: vllm-server, start_timeout: ...}",
    "vllm_group_port": "no: weights go over the server's own endpoints",
    "vllm_gpu_memory_utilization": _ENGINE % "gpu_memory_utilization",
    "vllm_max_model_length": _ENGINE % "max_model_len",
    "vllm_tensor_parallel_size": _ENGINE % "tensor_parallel_size",
    "vllm_enable_sleep_mode": _ENGINE % "sleep",
    "vllm_structured_outputs_regex": "rollout.engine: {name: vllm, structured_outputs: {regex: ...}}",
    "vllm_model_impl": "rollout.engine: {name: vllm, engine_args: {model_impl: ...}}",
    "vllm_importance_sampling_correction": "algorithm.correction",
    "vllm_importance_sampling_mode": _CORRECTION % "level",
    "vllm_importance_sampling_clip_max": "algorithm.correction: {name: truncate, cap: ...} or {name: mask, high: ...}",
    "vllm_importance_sampling_clip_min": _CORRECTION % "low",
    "vllm_importance_sampling_cap": _CORRECTION % "cap",
    # loss
    "loss_type": "algorithm.preset",
    "importance_sampling_level": "algorithm.loss: {name: clip, ratio: token or geometric}",
    "epsilon": "algorithm.loss: {name: clip, clip_low: ...}",
    "epsilon_high": "algorithm.loss: {name: clip, clip_high: ...}",
    "delta": "algorithm.loss: {name: clip, cap: ...}",
    "sapo_temperature_pos": _SOFT % "soft_positive",
    "sapo_temperature_neg": _SOFT % "soft_negative",
    "vespo_k_pos": _VESPO % "power_positive",
    "vespo_lambda_pos": _VESPO % "decay_positive",
    "vespo_k_neg": _VESPO % "power_negative",
    "vespo_lambda_neg": _VESPO % "decay_negative",
    "scale_rewards": "algorithm.advantage: {name: group, scale: std, batch_std or none}",
    "beta": "algorithm.kl: {coef: ...}",
    "use_bias_correction_kl": "algorithm.kl: {weighted: true}",
    "sync_ref_model": "algorithm.kl: {renew_every: ...}",
    "ref_model_sync_steps": "algorithm.kl: {renew_every: ...}",
    "ref_model_mixup_alpha": "algorithm.kl: {renew_mix: ...}",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "top_entropy_quantile": "algorithm.token_select: [{name: top_entropy, share: ...}]",
    "entropy_coef": "algorithm.entropy",
    "use_adaptive_entropy": _ENTROPY % "target",
    "entropy_coef_min": _ENTROPY % "minimum",
    "entropy_coef_max": _ENTROPY % "maximum",
    "entropy_coef_delta": _ENTROPY % "delta",
    "entropy_target": _ENTROPY % "target",
    "off_policy_mask_threshold": "algorithm.correction: {name: mask_negatives, max_kl: ...}",
    # rewards
    "reward_weights": "rewards: [{name: ..., weight: ...}]",
    "multi_objective_aggregation": "algorithm.advantage: {name: group, per_reward: {TERM: weight}}",
}
"""Argument of TRL's GRPOTrainer, of its scripts or of another trainer, or field of GRPOConfig -> our key."""

_ACTOR = "actor_rollout_ref.actor."
_ROLLOUT = "actor_rollout_ref.rollout."
_MODEL = "actor_rollout_ref.model."
_FP8 = "rollout.engine: {name: vllm, quantization: fp8}"

VERL: dict[str, str] = {
    "algorithm.adv_estimator": "algorithm.preset, or algorithm.advantage",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.advantage: {name: group, scale: std or none}",
    "algorithm.gamma": "algorithm.advantage: {name: spans, discount: ...}",
    "algorithm.lam": "no: it belongs to a critic",
    "algorithm.use_kl_in_reward": "algorithm.kl: {where: advantage or reward}",
    "algorithm.kl_penalty": "algorithm.kl: {estimator: ...}",
    "algorithm.kl_ctrl": "algorithm.kl: {coef: ...}",
    "algorithm.filter_groups": "rollout.dynamic_sampling",
    "algorithm.rollout_correction": "algorithm.correction",
    "algorithm.rollout_correction.bypass_mode": "algorithm.correction: null, with algorithm.decoupled: false",
    "algorithm.rollout_correction.rollout_is": "algorithm.correction: {name: truncate, level: ...}",
    "algorithm.rollout_correction.rollout_is_threshold": "algorithm.correction: {name: truncate, cap: ...}",
    "algorithm.rollout_correction.rollout_rs": "algorithm.correction: {name: mask or reject, ...}",
    "algorithm.rollout_correction.rollout_rs_threshold": "algorithm.correction: {name: mask or reject, ...}",
    "algorithm.rollout_correction.rollout_is_batch_normalize": "no: weights are not normalised over the batch",
    "algorithm.use_pf_ppo": "no: algorithm.select: [{name: best_worst, ...}] is similar",
    "algorithm.pf_ppo": "no: algorithm.select: [{name: best_worst, ...}] is similar",
    _ACTOR + "policy_loss": "algorithm.loss",
    _ACTOR + "policy_loss.loss_mode": "algorithm.preset, or algorithm.loss",
    _ACTOR + "policy_loss.clip_cov_ratio": "algorithm.loss: {name: clip_cov, share: ...}",
    _ACTOR + "policy_loss.clip_cov_lb": "algorithm.loss: {name: clip_cov, least: ...}",
    _ACTOR + "policy_loss.clip_cov_ub": "algorithm.loss: {name: clip_cov, most: ...}",
    _ACTOR + "policy_loss.kl_cov_ratio": "algorithm.loss: {name: kl_cov, share: ...}",
    _ACTOR + "policy_loss.ppo_kl_coef": "algorithm.loss: {name: kl_cov, coef: ...}",
    _ACTOR + "policy_loss.dro_beta": "algorithm.loss: {name: dro, beta: ...}",
    _ACTOR + "clip_ratio": "algorithm.loss: {name: clip, clip_low: ..., clip_high: ...}",
    _ACTOR + "clip_ratio_low": "algorithm.loss: {name: clip, clip_low: ...}",
    _ACTOR + "clip_ratio_high": "algorithm.loss: {name: clip, clip_high: ...}",
    _ACTOR + "clip_ratio_c": "algorithm.loss: {name: clip, cap: ...}",
    _ACTOR + "tau_pos": _SOFT % "soft_positive",
    _ACTOR + "tau_neg": _SOFT % "soft_negative",
    _ACTOR + "loss_agg_mode": "algorithm.loss: {name: clip, average: ...}",
    _ACTOR + "loss_scale_factor": "algorithm.loss: {name: clip, constant: ...}",
    _ACTOR + "entropy_coeff": "algorithm.entropy",
    _ACTOR + "use_kl_loss": "algorithm.kl: {coef: ...}",
    _ACTOR + "kl_loss_coef": "algorithm.kl: {coef: ...}",
    _ACTOR + "kl_loss_type": "algorithm.kl: {estimator: ...}",
    _ACTOR + "ppo_mini_batch_size": "optim.updates_per_batch, a number of updates and not a size",
    _ACTOR + "ppo_epochs": "optim.epochs_per_batch",
    _ACTOR + "ppo_micro_batch_size": "optim.micro_batch_size",
    _ACTOR + "ppo_micro_batch_size_per_gpu": "optim.micro_batch_size",
    _ACTOR + "use_dynamic_bsz": "optim.micro_batch_tokens",
    _ACTOR + "ppo_max_token_len_per_gpu": "optim.micro_batch_tokens",
    _ACTOR + "use_remove_padding": "optim.packing",
    _ACTOR + "use_prefix_grouper": "optim.share_prefix",
    _ACTOR + "use_fused_kernels": "no: log-probs and entropy are always computed in chunks",
    _ACTOR + "entropy_from_logits_with_chunking": "no: log-probs and entropy are always computed in chunks",
    _ACTOR + "use_torch_compile": "model.compile",
    _ACTOR + "ulysses_sequence_parallel_size": "no: there is no sequence parallelism",
    _ACTOR + "strategy": "distributed.backend, distributed.zero_stage",
    _ACTOR + "fsdp_config": "distributed.zero_stage, with distributed.backend: deepspeed",
    _ACTOR + "fsdp_config.param_offload": "distributed.offload: parameters",
    _ACTOR + "fsdp_config.optimizer_offload": "distributed.offload: optimizer",
    _ACTOR + "fsdp_config.model_dtype": "model.dtype",
    _ACTOR + "optim": "optim.lr and the other keys of optim",
    _ACTOR + "optim.lr": "optim.lr",
    _ACTOR + "optim.weight_decay": _ADAM % "weight_decay",
    _ACTOR + "optim.betas": _ADAM % "betas",
    _ACTOR + "optim.lr_warmup_steps": "optim.warmup_steps",
    _ACTOR + "optim.lr_warmup_steps_ratio": "optim.warmup_steps, in steps: the ratio x run.steps",
    _ACTOR + "optim.lr_scheduler_type": "optim.schedule",
    _ACTOR + "optim.warmup_style": "optim.schedule",
    _ACTOR + "optim.clip_grad": "optim.max_grad_norm",
    _ACTOR + "grad_clip": "optim.max_grad_norm",
    _ACTOR + "checkpoint": "checkpoint.every and the other keys of checkpoint",
    _ACTOR + "checkpoint.save_contents": "no: a checkpoint holds everything",
    _ACTOR + "checkpoint.async_save": "checkpoint.background",
    _ACTOR + "shuffle": "data.sampler",
    _ACTOR + "data_loader_seed": "run.seed",
    _ACTOR + "router_replay": "no: routes of experts are not replayed",
    _ACTOR + "qat": "no: there is no training in low precision",
    _ACTOR + "freeze_vision_tower": "no: there are no images",
    "actor_rollout_ref.ref": "algorithm.kl, whose reference is a snapshot of the policy",
    "actor_rollout_ref.ref.fsdp_config": "no: the reference is a copy of the weights that train, on their devices",
    "actor_rollout_ref.hybrid_engine": "no: rollout.engine says where the engine runs",
    _ROLLOUT + "name": "rollout.engine: vllm, vllm-server or hf",
    _ROLLOUT + "mode": "rollout.staleness, for rollouts ahead of training",
    _ROLLOUT + "n": "rollout.group_size",
    _ROLLOUT + "temperature": "rollout.temperature",
    _ROLLOUT + "top_p": "rollout.top_p",
    _ROLLOUT + "top_k": "rollout.top_k",
    _ROLLOUT + "response_length": "rollout.max_new_tokens",
    _ROLLOUT + "prompt_length": "data.max_prompt_tokens",
    _ROLLOUT + "gpu_memory_utilization": _ENGINE % "gpu_memory_utilization",
    _ROLLOUT + "tensor_model_parallel_size": _ENGINE % "tensor_parallel_size",
    _ROLLOUT + "max_model_len": _ENGINE % "max_model_len",
    _ROLLOUT + "max_num_seqs": _ENGINE % "max_num_seqs",
    _ROLLOUT + "max_num_batched_tokens": _ENGINE % "max_num_batched_tokens",
    _ROLLOUT + "quantization": _FP8,
    _ROLLOUT + "enforce_eager": _ENGINE % "engine_args",
    _ROLLOUT + "enable_chunked_prefill": _ENGINE % "engine_args",
    _ROLLOUT + "engine_kwargs": _ENGINE % "engine_args",
    _ROLLOUT + "free_cache_engine": _ENGINE % "sleep",
    _ROLLOUT + "ignore_eos": "rollout.ignore_eos",
    _ROLLOUT + "load_format": "no: the engine always has the trainer's weights",
    _ROLLOUT + "over_sample_rate": "rollout.dynamic_sampling: {oversample: ...}",
    _ROLLOUT + "calculate_log_probs": "no: log-probs are always kept",
    _ROLLOUT + "multi_turn": "rollout.plan: {name: turns, ...}",
    _ROLLOUT + "agent": "rollout.plan: {name: turns, ...}",
    _ROLLOUT + "val_kwargs": "evaluation.temperature, evaluation.samples and the other keys of evaluation",
    _ROLLOUT + "log_prob_micro_batch_size_per_gpu": "optim.micro_batch_size, optim.micro_batch_tokens",
    _ROLLOUT + "checkpoint_engine": "no: weights go to the engine in buckets of 256 MiB",
    _ROLLOUT + "checkpoint_engine.update_weights_bucket_megabytes": "no: buckets have 256 MiB",
    _MODEL + "path": "model.path",
    _MODEL + "trust_remote_code": "model.trust_remote_code",
    _MODEL + "override_config": "model.override_config",
    _MODEL + "lora_rank": "model.adapter: {r: ...}",
    _MODEL + "lora_alpha": "model.adapter: {alpha: ...}",
    _MODEL + "target_modules": "model.adapter: {target_modules: ...}",
    _MODEL + "enable_gradient_checkpointing": "model.gradient_checkpointing",
    _MODEL + "enable_activation_offload": "model.activation_offload",
    _MODEL + "use_remove_padding": "optim.packing",
    _MODEL + "use_liger": "model.fused_layers",
    "data.train_files": "data.train",
    "data.val_files": "data.eval",
    "data.train_batch_size": "rollout.prompts_per_step",
    "data.train_max_samples": "data.limit",
    "data.val_max_samples": "evaluation.limit",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.max_new_tokens",
    "data.filter_overlong_prompts": "data.skip_long_prompts",
    "data.filter_overlong_prompts_workers": "no: the ranks share the counting of prompts",
    "data.truncation": "no: a long prompt is refused, or left out by data.skip_long_prompts",
    "data.val_batch_size": "no: an evaluation is sampled in blocks that fit",
    "data.reward_fn_key": "no: a row's source selects no verifier; a term of rewards has `sources`",
    "data.return_raw_chat": "no: messages and token ids of a prompt are both kept",
    "data.image_key": "no: there are no images",
    "data.video_key": "no: there are no videos",
    "data.prompt_key": "data.fields: {prompt: ...}",
    "data.shuffle": "data.sampler",
    "data.seed": "run.seed",
    "data.apply_chat_template_kwargs": "data.template: {options: {...}}",
    "reward": "verifier and rewards",
    "reward.custom_reward_function": "verifier: FILE.py:compute_score",
    "reward.custom_reward_function.path": "verifier: FILE.py:compute_score",
    "reward.reward_manager": "rewards",
    "reward.sandbox_fusion": "verifier: {name: code, ...}",
    "reward.reward_model": "verifiers: {NAME: scorer, for a scalar head, or judge} (docs/judges.md)",
    # their places before verl 0.8
    "custom_reward_function": "verifier: FILE.py:compute_score",
    "reward_model": "verifier and rewards",
    "reward_model.overlong_buffer": "rewards: [verdict, {name: soft_overlong, cache: ...}]",
    "reward_model.overlong_buffer.enable": "rewards: [verdict, soft_overlong]",
    "reward_model.overlong_buffer.len": "rewards: [verdict, {name: soft_overlong, cache: ...}]",
    "reward_model.overlong_buffer.penalty_factor": "rewards: [verdict, {name: soft_overlong, weight: ...}]",
    "reward_manager": "rewards",
    "trainer": "the sections run, checkpoint, evaluation and logging",
    "trainer.total_epochs": "run.epochs",
    "trainer.total_training_steps": "run.steps",
    "trainer.project_name": "logging.wandb: {project: ...}",
    "trainer.experiment_name": "run.name",
    "trainer.default_local_dir": "run.dir",
    "trainer.save_freq": "checkpoint.every",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "trainer.test_freq": "evaluation.every",
    "trainer.val_before_train": "evaluation.at_start",
    "trainer.val_only": "no: the command rlvr evaluate",
    "trainer.resume_mode": "no: --resume auto, or train(resume=...)",
    "trainer.resume_from_path": "no: --resume PATH, or train(resume=PATH)",
    "trainer.logger": "logging.wandb, logging.tensorboard, logging.mlflow, logging.console",
    "trainer.rollout_data_dir": "logging.rollouts",
    "trainer.validation_data_dir": "no: an evaluation keeps the scores of its tasks, not the responses",
    "trainer.log_val_generations": "no: an evaluation keeps the scores of its tasks, not the responses",
    "trainer.device": "model.device",
    "trainer.critic_warmup": "no: there is no critic",
    "trainer.balance_batch": "no: work is always balanced over the ranks",
    "trainer.nnodes": "no: an option of torchrun",
    "trainer.n_gpus_per_node": "no: an option of torchrun",
    "critic": "no: there is no critic",
    "ray_kwargs": "no: there is no Ray; torchrun starts the ranks",
    "global_profiler": "logging.profile, a list of steps",
    "global_profiler.steps": "logging.profile",
    "global_profiler.tool": "no: logging.profile uses torch's profiler",
    "actor_rollout_ref": "the sections model, rollout, optim and algorithm",
}
"""Path of a key of verl's ppo_trainer.yaml -> our key."""


def peer_answer(path: str) -> str | None:
    """Return the answer to the unknown key `path` where it, its end or a section above it is a name of TRL or verl;
    None where it is neither."""
    if path in VERL:
        return _in_words(VERL[path], "verl")
    last = path.rpartition(".")[2]
    # `optim.learning_rate`, `rollout.num_generations`: TRL has no sections, so that people guess one.
    if last in TRL:
        return _in_words(TRL[last], "TRL")
    # `rollout.n`, `actor.clip_ratio`: the end of a path of verl's.
    ends = {answer for known, answer in VERL.items() if known.endswith(f".{path}")}
    if len(ends) == 1:
        return _in_words(ends.pop(), "verl")
    # Of a section that verl has and we do not, a key that is not listed.
    section = path.rpartition(".")[0]
    while section:
        if section in VERL:
            answer = VERL[section]
            if answer.startswith("no: "):
                return _in_words(answer, "verl")
            return f"of verl's section {section}, and not listed; what that section sets is here in {answer}"
        section = section.rpartition(".")[0]
    return None


def unknown_leaves(path: str, value: Any) -> Iterator[str]:
    """The paths of the values in `value`, which was written under the unknown key `path`: all of a mapping's, or
    `path` itself."""
    if not isinstance(value, Mapping) or not value or peer_answer(path) is None:
        yield path
        return
    for key, inner in value.items():
        yield from unknown_leaves(f"{path}.{key}", inner)


def _in_words(answer: str, library: str) -> str:
    if answer.startswith("no: "):
        return f"a name of {library}, which has no equivalent key here: {answer.removeprefix('no: ')}"
    return f"a name of {library}; here it is {answer}"
