"""What `python -m rlvr.audit` is made of: the built-in tricks and their trial, findings among many verdicts, the
tables."""
