"""The folder of a run, its checkpoints, its status and its evaluations."""
