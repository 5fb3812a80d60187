"""Parts of `python -m rlvr.audit`: the built-in tricks and their trial, findings among many verdicts, the
tables."""
