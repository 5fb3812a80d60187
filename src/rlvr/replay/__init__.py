"""Recorded rollouts scored again with another verifier or other rewards, and the differences.

`rescore` goes through a run's files and counts what changes; `__main__` is the command, and prints.
"""
