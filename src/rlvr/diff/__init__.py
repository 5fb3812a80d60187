"""The comparison of two runs: the first key, step, token and tensor in which they differ.

`metrics`, `rollouts` and `tensors` each look at one thing that runs leave behind; `__main__` is the command.
"""
