"""The comparison of two runs: the first key, step, token and tensor in which they differ.

`parting` (metrics), `rollouts` and `tensors` each compare one kind of file; `__main__` is the command.
"""
