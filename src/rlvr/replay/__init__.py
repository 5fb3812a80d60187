"""Recorded rollouts scored again: what another verifier or other rewards would have changed.

`rescore` goes through a run's files, `changes` counts, `show` says it; `__main__` is the command.
"""
