"""The monitors that every run has, in the order in which they speak.

`docs/when-it-does-not-learn.md` shows each of them at work on a run that was broken on purpose.
"""

from __future__ import annotations

from rlvr.monitor.health.monitors import Dominating, Drift, Jump, Monitor, PartingMonitor, Spikes, Sustained

# The thresholds are judgements, not fits. scripts/broken_runs/record.py tries each on a run that was broken for it
# (all have to speak) and on the healthy run that they were made from (none may speak);
# tests/monitor/health/test_watch.py holds both cases for each monitor. Values of a healthy run are in the column
# "healthy" of docs/metrics.md. `steps` is 5 where nothing else is written: with few groups a step, one bad step is
# chance.
_ALL: tuple[Monitor, ...] = (
    # What the groups teach
    Sustained(
        name="all_wrong",
        reads=("group/all_wrong", "reward/mean"),  # a share of what was judged; nothing where no reward is decided
        # A group of equal rewards has advantage 0 under a baseline of the group, so from 0.9 on a tenth of the batch or
        # less is trained.
        bad=lambda share, reward: share >= 0.9,
        message="in {value:.0%} of the groups every answer is wrong, and such groups give no gradient",
        advice="read some rollouts: does the policy answer in the form that the verifier expects? Then easier tasks, "
        "an sft stage before this one, a larger rollout.group_size or max_new_tokens; `python -m rlvr.audit` checks "
        "the verifier",
    ),
    Sustained(
        name="all_right",
        reads=("group/all_correct", "reward/mean"),
        bad=lambda share, reward: share >= 0.9,
        # Twice as long as all_wrong: it is also how a run ends that has learned its tasks.
        steps=10,
        message="in {value:.0%} of the groups every answer is right, and such groups give no gradient",
        advice="harder tasks, rollout.dynamic_sampling to replace such groups, or an end to the run; and audit the "
        "verifier if this comes as a surprise",
    ),
    Sustained(
        name="no_spread",
        reads=("group/zero_variance", "group/all_wrong", "group/all_correct"),
        # Groups that are all wrong or all right have no spread either. Where these are the cause, the two monitors
        # above speak; this one is for a reward that gives every answer the same value between 0 and 1.
        bad=lambda same, wrong, right: same >= 0.95 and wrong < 0.9 and right < 0.9,
        steps=10,
        message="in {value:.0%} of the groups all rewards are the same, so that there is hardly an advantage",
        advice="a reward that tells answers apart, a higher rollout.temperature, a larger rollout.group_size, "
        "rollout.dynamic_sampling",
    ),
    # What the verifier says
    Sustained(
        name="verifier_errors",
        reads=("verdict/error",),
        # Lower than any bound on what the policy does: an error is a defect of the verifier, and a working one has
        # none. Three steps, so that one outage of a service does not end a run under `stop`.
        bad=lambda share: share >= 0.05,
        steps=3,
        message="the check of {value:.0%} of the completions failed: they are left out, or score 0 where the answer "
        "is to blame",
        advice="the reasons below, or in rollouts/*.jsonl under `verdicts`; a service that is down, a gold answer that "
        "cannot be read, a verifier that raises",
        examples="error",
    ),
    Sustained(
        name="verifier_timeouts",
        reads=("verdict/timeout",),
        # Above the bound on errors: a policy under exploration writes some programs that do not end.
        bad=lambda share: share >= 0.1,
        steps=3,
        message="the check of {value:.0%} of the completions ran out of time: they score 0, or are left out where the "
        "answer is not to blame",
        advice="a higher verification.time_limit, more verification.workers; or the policy has found answers that are "
        "costly to check: look at the completions below",
        examples="timeout",
    ),
    Sustained(
        name="undecided_rewards",
        reads=("reward/undecided", "verdict/error", "verdict/timeout"),
        # Errors and timeouts are subtracted, since they have monitors of their own; what is left are terms of the
        # reward that returned None or NaN.
        bad=lambda share, errors, timeouts: share - errors - timeouts >= 0.05,
        steps=3,
        message="{value:.0%} of the completions have no reward, though they were checked, and are left out",
        advice="the terms of `rewards` that return None or NaN, or raise (reward/raised counts that): the columns "
        "`reward/NAME` in rollouts/*.jsonl say which",
    ),
    Sustained(
        name="unparsable",
        reads=("verdict/unparsable",),
        # Below a half, enough completions are judged that training itself teaches the form.
        bad=lambda share: share >= 0.5,
        message="no answer is found in {value:.0%} of the completions",
        advice="say in the prompt (data.template) in which form the answer is wanted, show it in an sft stage, or give "
        "the verifier a laxer extraction; compare with the examples below",
        examples="unparsable",
    ),
    Sustained(
        name="no_spans",
        reads=("span/missing",),
        # Where a single completion has one, the source of the scores works, and how many it scores is its own affair.
        bad=lambda share: share >= 1,
        message="an advantage or a term reads scores of spans, and no completion has any: credit is given to whole "
        "completions, or not at all",
        advice="a verifier that gives spans (steps, step_scorer), or another advantage; of a verifier of your own, "
        "that its Verdict has `spans`",
    ),
    # What is written
    Sustained(
        name="truncated",
        reads=("completion/truncated",),
        # Healthy is below 0.1. A cut completion mostly has no answer, so at a half the reward is about length.
        bad=lambda share: share >= 0.5,
        message="{value:.0%} of the completions are cut before they end",
        advice="a larger rollout.max_new_tokens, a stop string, a model that ends its answers (an sft stage), the "
        "soft_overlong reward; algorithm.mask_truncated leaves them out of the loss",
    ),
    Jump(
        name="length_jump",
        reads=("completion/length_mean",),
        factor=2.0,
        message="completions suddenly became long: {value:.0f} tokens, {start:.0f} just before",
        advice="look at the newest rollouts (loops? a trick?); a lower optim.lr, the soft_overlong reward",
    ),
    Drift(
        name="length_drift",
        reads=("completion/length_mean", "reward/mean"),
        versus_others=True,
        # 0.02 of reward over the medians of ten steps each: less is noise for a reward between 0 and 1. A reward on
        # another scale moves the bound with it.
        bad=lambda start, now, earned, earns: now > 2 * start > 0 and earns < earned + 0.02,
        message="completions have grown from {start:.0f} to {value:.0f} tokens, and earn no more for it",
        advice="algorithm.preset=dr_grpo or loss.average=constant (a mean over each response favours long wrong ones), "
        "the soft_overlong or brevity reward",
    ),
    Drift(
        name="length_collapse",
        reads=("completion/length_mean", "reward/mean"),
        versus_others=True,
        # A third and not a half: a verbose model that learns to be brief halves its answers in a healthy run.
        bad=lambda start, now, earned, earns: 3 * now < start and earns < earned + 0.02,
        message="completions have shrunk from {start:.0f} to {value:.0f} tokens, and earn no more for it",
        advice="a lower optim.lr; look for a term of the reward that pays short answers",
    ),
    Sustained(
        name="repetition",
        reads=("completion/repetition",),
        bad=lambda share: share >= 0.5,
        message="{value:.0%} of what is written repeats itself within a completion",
        advice="the repetition reward, a lower optim.lr, a KL penalty (algorithm.kl.coef), a shorter "
        "rollout.max_new_tokens",
    ),
    Sustained(
        name="duplicates",
        reads=("completion/duplicates", "group/all_correct"),
        # A policy that has solved tasks with short answers writes the same answer again, hence the second metric.
        bad=lambda share, right: share >= 0.8 and right < 0.5,
        message="{value:.0%} of the completions are copies of another of their group, though the tasks are not solved",
        advice="a higher rollout.temperature (and check that seeds differ, with an engine of your own), an entropy "
        "bonus, a higher clip_high",
    ),
    # The policy
    Drift(
        name="entropy_collapse",
        reads=("entropy", "group/all_correct"),
        # 0.05 nats are a perplexity of e^0.05 = 1.05 choices a token. The factor of 5 keeps quiet about models whose
        # entropy was low from the start, `right` about those that are sure because they have learned the tasks.
        bad=lambda start, now, right: now < 0.05 and now < start / 5 and right < 0.5,
        message="entropy has fallen from {start:.2g} to {value:.2g} nats: the policy hardly tries anything else any "
        "more",
        advice="a higher clip_high (preset dapo), an entropy bonus driven to a target (algorithm.entropy), "
        "rollout.temperature 1, a lower optim.lr",
    ),
    Drift(
        name="entropy_blowup",
        reads=("entropy",),
        # Both, since twice of a small entropy is still small, and half a nat is little where it began at several.
        bad=lambda start, now: now > 2 * start and now > start + 0.5,
        message="entropy has risen from {start:.2g} to {value:.2g} nats: the policy writes more and more at random",
        advice="a lower optim.lr, no entropy bonus, a KL penalty (algorithm.kl.coef); check the signs of your rewards",
    ),
    Sustained(
        name="kl_runaway",
        reads=("kl/ref",),
        # Half a nat a token is a factor of 1.6 in the probability of the average token. The bound is arbitrary: a
        # run without a KL term has no natural one, and a larger number only speaks later.
        bad=lambda kl: kl > 0.5,
        message="the policy is {value:.2g} nats per token away from the reference",
        advice="a lower optim.lr, a larger algorithm.kl.coef, or algorithm.kl.renew_every where the distance is wanted",
    ),
    # The update
    Sustained(
        name="ratio_drift",
        reads=("ratio/mean",),
        # The mean of pi / pi_old over tokens of pi_old is 1 in expectation, whatever pi is; 0.1 is half of the usual
        # clip range of 0.2.
        bad=lambda ratio: abs(ratio - 1) > 0.1,
        message="the mean probability ratio is {value:.2f}, far from 1: the updates of one batch go too far",
        advice="a lower optim.lr, fewer optim.updates_per_batch or epochs_per_batch",
    ),
    Sustained(
        name="mismatch",
        reads=("mismatch/mean",),
        # Five times the 0.01 that docs/metrics.md calls healthy.
        bad=lambda gap: gap > 0.05,
        message="the log-probs sampled with differ from those trained on by {value:.2g} nats per token",
        advice="algorithm.correction (truncate or mask), less rollout.staleness, the same dtype in engine and "
        "trainer; check that the engine applies no other temperature or penalty",
    ),
    Sustained(
        name="clip_share",
        reads=("ratio/clipped_low", "ratio/clipped_high"),
        # Healthy is below 0.05 for each bound. The ratio of a whole response clips more by design: the GSPO paper
        # (arXiv 2507.18071) reports about 0.15 of the tokens for its own runs.
        bad=lambda low, high: low + high > 0.3,
        message="clipping takes the gradient from much of the batch ({value:.0%} of the tokens at the lower bound "
        "alone)",
        advice="a lower optim.lr, fewer optim.updates_per_batch, wider loss.clip_low and clip_high",
    ),
    Spikes(
        name="gradient_spikes",
        reads=("grad_norm",),
        message="{times} of the last 20 gradient norms were over ten times the usual {start:.2g} (up to {value:.2g})",
        advice="a lower optim.lr, a longer warm-up, a smaller optim.max_grad_norm; look at rewards and lengths of "
        "those steps",
    ),
    Sustained(
        name="lr_zero",
        reads=("lr",),
        bad=lambda lr: lr <= 0,
        # A schedule that decays to 0 may reach it at the last step, which is no trouble.
        steps=3,
        message="the learning rate is 0: nothing is learned",
        advice="optim.lr, warmup_steps and min_lr; is `steps` of the stage what the schedule should end at?",
    ),
    # What is earned
    PartingMonitor(
        name="reward_hacking",
        reads=("reward/mean",),
        message="the reward rose from {before:.2f} to {now:.2f} while the held-out score fell from {top:.2f} to "
        "{value:.2f}",
        advice="read the best-paid rollouts: what is rewarded there? `python -m rlvr.audit --tricks` tries the "
        "verifier. Or the policy learns the training tasks by heart: more of them, fewer epochs; the checkpoint of the "
        "best step is the one to keep (checkpoint.best)",
    ),
    Dominating(
        name="term_dominates",
        reads=("explained/*",),
        # Squared correlations: 0.95 leaves 5 % of the variance within groups to everything else. The second condition:
        # shares of correlated terms do not add up to 1. A term that agrees with the verdict explains as much as the
        # verdict does, and that is harmless.
        bad=lambda other, verdict: other >= 0.95 and verdict <= 0.5,
        steps=10,
        message="a term other than the verdict makes {value:.0%} of the differences between the rewards of a group",
        advice="a smaller `weight` for it, or a `gate` that pays it to right answers only",
    ),
    # The machine
    Sustained(
        name="stale_weights",
        reads=("policy/staleness_mean", "mismatch/mean"),
        # The age alone is what `rollout.staleness` asked for. It is trouble where the policy has moved meanwhile, which
        # the log-probs show: 0.03 is between the healthy 0.01 and the 0.05 of `mismatch`.
        bad=lambda age, gap: age >= 2 and gap > 0.03,
        message="tokens are sampled with weights that are {value:.1f} versions old, and the policy has moved on since",
        advice="less rollout.staleness, and algorithm.correction; or more of the machine for sampling",
    ),
    Drift(
        name="slow",
        reads=("time/tokens_per_second",),
        # Completions that become longer, or a batch with one long straggler, halve the rate in a healthy run.
        bad=lambda start, now: now < 0.4 * start,
        message="{value:.0f} tokens/s, {start:.0f} when the stage began",
        advice="the times by phase say where it goes; longer completions, a verifier that waits, another process on "
        "the machine; logging.profile looks into a step",
    ),
)

MONITORS: dict[str, Monitor] = {monitor.name: monitor for monitor in _ALL}
"""By name."""
