"""Recorded rollouts scored again with another verifier or other rewards, and the differences.

`rescore` goes through a run's files, `changes` counts, `show` prints; `__main__` is the command.
"""
