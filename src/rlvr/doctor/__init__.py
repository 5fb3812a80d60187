"""The state of this machine and environment, and what could be installed."""
