"""Sizes and rates of recipes, against the numbers of their authors' scripts, where no oracle of a step depends on them.

A row names the file and what stands there; `updates` are its prompts by the prompts of a mini-batch.
"""

from __future__ import annotations

import itertools
import math

import pytest
from hand_written_steps import plan_of

from rlvr.stages.stage_base import learning_rate

# (recipe, stage, file at a commit) -> learning rate, prompts a step, of a mini-batch, responses, tokens of a response,
# of a prompt (None: not limited here), temperature, KL weight.
SCRIPTS = {
    ("autothink", "balance", "TU2021/AutoThink@be0bcb0 scripts/train/train_stage1.sh"): (
        *(1e-6, 128, 64, 8, 8192, 1024, 0.6, 0.0),
    ),
    ("autothink", "both", "TU2021/AutoThink@be0bcb0 scripts/train/train_stage2.sh"): (
        *(1e-6, 64, 64, 8, 16384, 1024, 0.6, 0.0),
    ),
    ("autothink", "short", "TU2021/AutoThink@be0bcb0 scripts/train/train_stage3.sh"): (
        *(1e-6, 64, 64, 8, 24576, 1024, 0.6, 0.0),
    ),
    ("canon", "grpo", "biuboomc/CANON@7d6f814 scripts/setups.sh"): (1e-6, 512, 32, 16, 8192, 2048, 1.0, 0.0),
    # Two sides of 128 prompts each, in one update.
    ("co-reward", "grpo", "tmlr-group/Co-rewarding@6c60ea4 Co-rewarding-I/run_corewarding-I.sh"): (
        *(3e-6, 256, 256, 8, 3072, None, 1.0, 0.005),
    ),
    ("dars", "grpo", "yangzhch6/DARS@9b21b71 experiments/DARS-7B-ET-Breadth.sh"): (
        *(5e-6, 3072, 3072, 8, 3072, 1024, 1.0, 0.0),
    ),
    ("demystifying-long-cot", "grpo", "eddycmu/demystify-long-cot@e90cf9b section_4.5__...repetition_penalty.sh"): (
        # 512 prompts of 16 responses, trained in batches of 512 responses.
        *(5e-7, 512, 32, 16, 14336, None, 1.0, 0.01),
    ),
    ("laser", "grpo", "RUCBM/LaSeR@48996f7 verl/examples/grpo_trainer/run_qwen2_5_7b.sh"): (
        *(1e-6, 128, 128, 8, 8192, 2048, 1.0, 0.0),
    ),
    ("laser-002-343", "grpo", "hkust-nlp/Laser@c9e7c4e scripts/training/laser-d-1.5b/laser-d-1.5b-l4096.sh"): (
        *(1e-6, 128, 64, 8, 16384, 1024, 0.6, 0.001),
    ),
    ("pacs", "grpo", "ritzz-ai/PACS@bbe1dc6 scripts/pacs/pacs_beta_1.0.sh"): (1e-6, 1024, 256, 8, 4096, 512, 1.0, 0.0),
    ("psr", "grpo", "TianHongZXY/RLVR-Decomposed@a5d4e7c run_qwen2.5-math-7b_psr_nsr.sh"): (
        *(1e-6, 1024, 256, 8, 3072, 1024, 1.0, 0.0),
    ),
    ("reasonrank", "grpo", "8421BCD/ReasonRank@06721fd verl/train_grpo.sh"): (1e-6, 16, 8, 8, 3072, 20480, 1.0, 0.001),
    ("relift", "grpo", "TheRoadQaQ/ReLIFT@eb95454 examples/7b/train.sh"): (1e-6, 128, 64, 8, 8192, 1024, 1.0, 0.0),
    ("riskpo", "grpo", "RTkenny/RiskPO@65ec40c scripts/run_qwen2.5_1.5b_MVaR_dapomath.sh"): (
        *(1e-6, 512, 128, 10, 3072, 1024, 1.0, 0.0),
    ),
    # Eight with the external answer.
    ("rl-plus", "grpo", "YihongDong/RL-PLUS@eb4aa4d exp_scripts/train_RL-PLUS.sh"): (
        *(1e-6, 128, 64, 7, 8192, 1024, 1.0, 0.0),
    ),
    ("rlpr", "grpo", "OpenBMB/RLPR@8490fca examples/RLPR/reproduce_qwen.sh"): (1e-6, 768, 192, 8, 3072, 2048, 1.0, 0.0),
    ("rover", "grpo", "tinnerhrhe/ROVER@b0fa587 Math/scripts/deepscaler/train/rover_qwen3_8b.sh"): (
        *(1e-6, 128, 32, 8, 8192, 1024, 0.6, 0.0),
    ),
    ("sar", "grpo", "amazon-science/Self-Aligned-Reward-...@08892d0 scripts/SA-grpo-4B.sh"): (
        *(1e-6, 128, 64, 6, 4096, 1024, 1.0, 0.001),
    ),
    ("self", "grpo", "mail-research/SELF-llm-interference@d17634b slurm/train_max_ppo.sh"): (
        *(1e-6, 128, 64, 8, 3072, 1024, 1.0, 0.0),
    ),
    # README.md gives the options of the command, the script its defaults.
    ("simplerl-zoo", "grpo", "hkust-nlp/simpleRL-reason@cf1c785 README.md, train_grpo_math_tune_ray.sh"): (
        *(5e-7, 1024, 256, 8, 8192, 1024, 1.0, 1e-4),
    ),
    ("sparkle", "broad", "sparkle-reasoning/sparkle@c3581c9 scripts/train/stage_one.sh"): (
        *(1e-6, 128, 64, 32, 3000, 1024, 0.6, 0.001),
    ),
    ("sparkle", "hard", "sparkle-reasoning/sparkle@c3581c9 scripts/train/stage_two_aug.sh"): (
        *(1e-6, 128, 64, 32, 3000, 1024, 0.6, 0.01),
    ),
    ("tempo", "grpo", "fatebreaker/tempo@0a1c273 train_math_tempo.sh"): (1e-6, 512, 64, 7, 8192, 1024, 1.0, 0.0),
    ("toolrl", "grpo", "qiancheng0/ToolRL@8cee13e examples/grpo_trainer/run_grpo.sh"): (
        *(1e-6, 512, 128, 4, 1024, 2048, 1.0, 0.001),
    ),
    ("ucas", "grpo", "xvolcano02/UCAS@b122ff2 train_ucas_math_7b.sh"): (1e-6, 1024, 128, 16, 3072, 1024, 1.0, 0.0),
    # 2 prompts on each of 8 devices.
    (
        "practical-two-stage-recipe",
        "grpo",
        "analokmaus/kaggle-aimo2-fast-math-r1@09bf8ff experiments/train_second_stage.py",
    ): (*(4e-6, 16, 16, 8, 16384, None, 1.0, 0.04),),
    # max_input_seq_length: longer prompts have no weight in their loss.
    ("br-rm", "grpo", "yzjiao/BR-RM@34a58b2 train_brrm_multinode_8b.sh"): (
        *(5e-7, 128, 32, 8, 16384, 16384, 1.0, 0.001),
    ),
    # batch_size is of prompts; 11,264 tokens are the context of the engine.
    ("chord", "grpo", "modelscope/Trinity-RFT@0414330 examples/mix_chord/mix_chord.yaml"): (
        *(1e-6, 32, 32, 8, 10240, 11264 - 10240, 1.0, 0.0),
    ),
    ("copo", "grpo", "hijih/copo-code@c15c75f verl/run_copo.sh"): (1e-6, 512, 32, 6, 2048, 1024, 1.0, 0.0),
    ("rm-r1", "grpo", "RM-R1-UIUC/RM-R1@d4c2542 rm_r1/scripts/RLVR/local/train_rm_r1_rlvr_qwen2.5_instruct_7b.sh"): (
        *(1e-6, 1024, 128, 7, 8192, 4096, 1.0, 0.001),
    ),
    ("rlmt", "grpo", "princeton-pli/RLMT@2cde311 training/ppo_grpo/configs/grpo__qwenbase__zero__think.yaml"): (
        *(1e-6, 64, 64, 8, 4096, 896, 0.7, 0.001),
    ),
    # ppo_mini_batch_size is 256 times 8 responses, of which half is removed: 512 prompts.
    ("prof", "grpo", "amazon-science/PROF-GRPO@8164ec2 prof_grpo/scripts/run_prof_grpo.sh"): (
        *(1e-6, 1024, 512, 8, 3072, 1024, 1.0, 0.001),
    ),
    ("fapo", "grpo", "verl-project/verl-recipe@48ea0a7 fapo/run_fapo_7b.sh"): (1e-6, 512, 32, 8, 8192, 2048, 1.0, 0.0),
    ("par", "grpo", "PorUna-byte/PAR@b8caf40 auto_sh/gemma2-2b_ultrafb_bin.sh, configs/config.py"): (
        *(3e-7, 16, 16, 5, 512, 512, 0.9, 0.005),
    ),
    ("verifree", "grpo", "sail-sg/VeriFree@718b363 run.sh"): (1e-6, 16, 16, 8, 3000, 1024, 1.0, 0.0),
    # 4 responses on each of 7 devices, 5 times; prompt and response are 4,096 tokens.
    (
        "warm-up-before-you-train",
        "grpo",
        "safal312/warmup-before-you-train@c9c4a42 train/grpoconfig.yaml, train/trainer_qwen.py",
    ): (*(1e-6, 4 * 7 * 5 // 10, 14, 10, 4096 - 256, 256, 0.7, 0.0),),
}


@pytest.mark.parametrize("row", SCRIPTS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_sizes_and_rates_are_those_of_the_authors_script(row):
    slug, name, _ = row
    lr, prompts, mini, responses, longest, prompt, temperature, kl = SCRIPTS[row]
    config = plan_of(slug, name).config
    rollout, optim = config.rollout, config.optim
    assert optim.lr == lr
    assert (rollout.prompts_per_step, rollout.group_size) == (prompts, responses)
    assert rollout.prompts_per_step / optim.updates_per_batch == mini
    assert (rollout.max_new_tokens, config.data.max_prompt_tokens) == (longest, prompt)
    assert rollout.temperature == temperature
    assert (0.0 if config.algorithm.kl is None else config.algorithm.kl.coef) == kl


# (recipe, stage) -> the steps that the same file sets, or that its epochs are in whole batches.
STEPS = {
    ("br-rm", "grpo"): 1000,  # examples/configs/grpo_brrm.yaml
    ("canon", "grpo"): 2 * (47_000 // 512),
    ("co-reward", "grpo"): 3 * (7500 // 128),
    ("dars", "grpo"): 86,
    ("fapo", "grpo"): 200,
    ("laser", "grpo"): 2 * (103_022 // 128),
    ("one-shot-cft", "sft"): 50 * 600 // 512,
    ("pacs", "grpo"): 300,
    ("practical-two-stage-recipe", "grpo"): 40,
    ("practical-two-stage-recipe", "sft"): 350,
    ("par", "grpo"): 2 * (61_135 // 16),
    ("prof", "grpo"): 283,  # rows of prof_grpo/eval_plot/wandb_metrics/PROF-GRPO/critic_score_mean.csv
    ("raft", "grpo"): 20,
    # 5 epochs and 1 of the rows that huggingface.co/liuwenhan/datasets counts, about 65 of which are for validation
    ("reasonrank", "sft"): 5 * 6_780 // 64,
    ("reasonrank", "grpo"): (6_770 - 65) // 16,
    ("rlmt", "grpo"): 2 * (7544 // 64),
    # num_examples in the README.md of both sets, one epoch each
    ("rm-r1", "sft"): 8_753 // 128,
    ("rm-r1", "grpo"): 64_226 // 1024,
    ("rover", "grpo"): 600,  # README.md evaluates global_step_600
    ("sar", "grpo"): 500,
    ("toolrl", "grpo"): 104,
    ("warm-up-before-you-train", "grpo"): 178,  # 25 epochs of 100 tasks, 14 in a step
}


@pytest.mark.parametrize("stage", STEPS, ids="-".join)
def test_the_steps_are_those_of_the_authors(stage):
    assert plan_of(*stage).steps == STEPS[stage]


# (recipe, stage, file at a commit) -> weight decay, entropy bonus, norm that the gradient is cut to. Defaults are
# in fsdp_workers.py of verl (decay) and its configuration (norm); recipes say why a norm or a bonus is a part.
OPTIMIZERS = {
    **{
        ("autothink", name, "TU2021/AutoThink@be0bcb0 verl/verl/workers/fsdp_workers.py, ppo_trainer.yaml"): (
            *(0.01, 0.001, 1.0),
        )
        for name in ("balance", "both", "short")
    },
    # Their script has no constant bonus; the 1 is the weight of the coefficients of each token.
    ("light-if", "grpo", "Qihoo360/Light-IF@01e9003 rl/verl/verl/trainer/config/actor/actor.yaml"): (0.01, 1.0, 1.0),
    # LLaMA-Factory's trainer is transformers', whose weight decay is 0. The bonus is the section's, which imitation
    # does not read.
    ("light-if", "sft", "Qihoo360/Light-IF@01e9003 coldstart/README.md"): (0.0, 1.0, 1.0),
    ("co-reward", "grpo", "tmlr-group/Co-rewarding@6c60ea4 verl/trainer/config/ppo_trainer.yaml"): (0.01, 0.0, 1 / 2),
    ("laser-002-343", "grpo", "hkust-nlp/Laser@c9e7c4e verl/trainer/config/lengthy_ppo_trainer.yaml"): (
        *(0.01, 0.001, 1.0),
    ),
    ("pacs", "grpo", "ritzz-ai/PACS@bbe1dc6 src/pacs/pacs_actor.py, which cuts no norm"): (0.01, 0.0, 1e9),
    ("reasonrank", "grpo", "8421BCD/ReasonRank@06721fd verl/verl/trainer/config/ppo_trainer.yaml"): (0.01, 0.0, 1.0),
    ("rl-plus", "grpo", "YihongDong/RL-PLUS@eb4aa4d rl_plus/verl/verl/recipe/rlplus_fsdp_worker.py"): (
        *(0.01, 0.001 * 7 / 32, 1 / 64),
    ),
    ("rover", "grpo", "tinnerhrhe/ROVER@b0fa587 Math/verl/trainer/config/actor/dp_actor.yaml"): (0.01, 0.0, 1.0),
    ("sar", "grpo", "amazon-science/Self-Aligned-Reward-...@08892d0 verl/trainer/config/ppo_trainer.yaml"): (
        *(0.01, 0.0, 1 / 4),
    ),
    ("toolrl", "grpo", "qiancheng0/ToolRL@8cee13e verl/workers/fsdp_workers.py, ppo_trainer.yaml"): (0.01, 0.001, 1.0),
}


@pytest.mark.parametrize("row", OPTIMIZERS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_decay_bonus_and_norm_are_those_of_the_authors(row):
    config = plan_of(*row[:2]).config
    optim = config.optim
    found = (optim.optimizer.options.get("weight_decay", 0.0), config.algorithm.entropy, optim.max_grad_norm)
    assert found == pytest.approx(OPTIMIZERS[row])


# (recipe, stage, file at a commit) -> steps until the learning rate is whole.
WARM_UPS = {
    ("br-rm", "grpo", "yzjiao/BR-RM@34a58b2 examples/configs/grpo_brrm.yaml"): 50,
    ("warm-up-before-you-train", "warm-up", "safal312/warmup-before-you-train@c9c4a42 train/sftconfig.yaml"): 25,
    ("warm-up-before-you-train", "grpo", "safal312/warmup-before-you-train@c9c4a42 train/grpoconfig.yaml"): 25,
}


@pytest.mark.parametrize("row", WARM_UPS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_learning_rate_rises_as_long_as_the_authors(row):
    plan = plan_of(*row[:2])
    rates = [learning_rate(plan.config.optim, step, int(plan.steps)) for step in range(WARM_UPS[row] + 1)]
    assert all(one < two for one, two in itertools.pairwise(rates[:-1]))
    assert rates[-2] == rates[-1] == plan.config.optim.lr


# (recipe, stage, file at a commit) -> demonstrations of an optimizer step: of a device, accumulated, times devices.
DEMONSTRATIONS = {
    # The number of devices is ours in both.
    ("reasonrank", "sft", "8421BCD/ReasonRank@06721fd LLaMA-Factory/examples/train_full/qwen_full_sft.yaml"): 1 * 8 * 8,
    ("warm-up-before-you-train", "warm-up", "safal312/warmup-before-you-train@c9c4a42 train/sftconfig.yaml"): 1 * 2 * 8,
}


@pytest.mark.parametrize("row", DEMONSTRATIONS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_a_step_of_imitation_has_the_authors_demonstrations(row):
    config = plan_of(*row[:2]).config
    assert config.rollout.prompts_per_step / config.optim.updates_per_batch == DEMONSTRATIONS[row]


# (recipe, stage, file at a commit) -> lower and upper clip of the ratio, clamp of the KL's value, if longer prompts are
# left out. With one update for a batch no ratio differs from 1, so that no gradient shows a clip.
BOUNDS = {
    ("co-reward", "grpo", "tmlr-group/Co-rewarding@6c60ea4 verl/trainer/ppo/core_algos.py, kl_penalty"): (
        *(0.2, 0.2, 10.0, False),
    ),
    ("laser-002-343", "grpo", "hkust-nlp/Laser@c9e7c4e verl/trainer/ppo/core_algos.py, kl_penalty"): (
        *(0.2, 0.28, 10.0, True),
    ),
    ("reasonrank", "grpo", "8421BCD/ReasonRank@06721fd verl/verl/trainer/ppo/core_algos.py, kl_penalty"): (
        *(0.2, 0.2, 10.0, True),
    ),
    ("light-if", "grpo", "Qihoo360/Light-IF@01e9003 rl/verl/verl/trainer/ppo/core_algos.py, kl_penalty"): (
        *(1.0, 1.0, 10.0, False),
    ),
    ("sar", "grpo", "amazon-science/Self-Aligned-Reward-...@08892d0 verl/trainer/ppo/core_algos.py, kl_penalty"): (
        *(0.2, 0.2, 10.0, True),
    ),
    ("sparkle", "broad", "sparkle-reasoning/sparkle@c3581c9 verl/verl/trainer/ppo/core_algos.py, kl_penalty"): (
        *(0.2, 0.2, 10.0, True),
    ),
    ("sparkle", "hard", "sparkle-reasoning/sparkle@c3581c9 verl/verl/trainer/ppo/core_algos.py, kl_penalty"): (
        *(0.2, 0.2, 10.0, True),
    ),
    # clip_ratio of verl/trainer/config/ppo_trainer.yaml; the KL is in the reward, by k1.
    ("toolrl", "grpo", "qiancheng0/ToolRL@8cee13e verl/trainer/ppo/core_algos.py, kl_penalty"): (0.2, 0.2, None, False),
    # epsilon is the default of their copy of TRL, train/trl/trl/trainer/grpo_config.py. They cut longer prompts.
    ("warm-up-before-you-train", "grpo", "safal312/warmup-before-you-train@c9c4a42 train/grpoconfig.yaml"): (
        *(0.2, 0.2, None, True),
    ),
}


@pytest.mark.parametrize("row", BOUNDS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_ratio_and_the_kl_are_bounded_as_the_authors_do(row):
    slug, name, _ = row
    low, high, clamp, skips = BOUNDS[row]
    config = plan_of(slug, name).config
    options = config.algorithm.loss.options
    assert (options["clip_low"], options["clip_high"]) == (low, high)
    assert (None if config.algorithm.kl is None else config.algorithm.kl.bound) == clamp
    assert config.data.skip_long_prompts is skips


# (recipe, stage, file at a commit) -> the rate at the start of the schedule, the share of the steps that is warm-up,
# and the rate at the end as a share of it.
SCHEDULES = {
    # learning_rate, warmup_ratio and lr_scheduler_type
    ("reasonrank", "sft", "8421BCD/ReasonRank@06721fd LLaMA-Factory/examples/train_full/qwen_full_sft.yaml"): (
        *(5e-6, 0.1, 0.0),
    ),
    # CFG.LR and "cosine" over 20 epochs, of which the checkpoint that they go on with is the ninth.
    (
        "practical-two-stage-recipe",
        "sft",
        "analokmaus/kaggle-aimo2-fast-math-r1@09bf8ff experiments/train_first_stage.py",
    ): (*(1e-5, 0.0, (1 + math.cos(math.pi * 9 / 20)) / 2),),
    # LR of the script; cli/train_ce.py: cosine_with_min_lr to a tenth, 3 % of the steps
    ("implicit-prm", "sft", "PRIME-RL/ImplicitPRM@c044175 train/tasks/run_ce.sh, train/openrlhf/cli/train_ce.py"): (
        *(5e-7, 0.03, 0.1),
    ),
    # warmup_style and lr_warmup_steps_ratio
    ("co-reward", "grpo", "tmlr-group/Co-rewarding@6c60ea4 Co-rewarding-I/run_corewarding-I.sh"): (*(3e-6, 0.1, 0.0),),
    # --actor_learning_rate; trainer/ray/ppo_actor.py: cosine_with_min_lr to a tenth
    (
        "demystifying-long-cot",
        "grpo",
        "eddycmu/demystify-long-cot@e90cf9b openrlhf/openrlhf/trainer/ray/ppo_actor.py",
    ): (*(5e-7, 0.03, 0.1),),
}


@pytest.mark.parametrize("row", SCHEDULES, ids=lambda row: f"{row[0]}-{row[1]}")
def test_learning_rates_rise_and_fall_as_the_authors_do(row):
    slug, name, _ = row
    peak, warm, end = SCHEDULES[row]
    plan = plan_of(slug, name)
    steps = int(plan.steps)
    rates = [learning_rate(plan.config.optim, step, steps) for step in range(steps + 1)]
    begin = round(warm * steps)
    assert rates[begin] == pytest.approx(peak)
    assert rates[0] == pytest.approx(peak / max(1, begin))
    # Half way between the end of the warm-up and the last step a cosine is at the mean of both ends.
    assert rates[(begin + steps) // 2] == pytest.approx(peak * (1 + end) / 2, rel=0.02)
    assert rates[steps] == pytest.approx(peak * end, rel=0.005, abs=1e-12)
