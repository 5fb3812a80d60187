"""Output of a run: metrics, timers, trackers, the console and the recorded rollouts.

Invariants:
- `monitor.metrics` imports nothing of the library but its errors, so that every package can name a metric.
- Nothing here imports torch; what a tracker needs (wandb, tensorboard, mlflow) is imported only when a run asks for it.
- Nothing here can stop or delay a run, but for the files of the run folder, whose loss is an error.
"""
