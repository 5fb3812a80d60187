"""Tools for started processes: start and end, frames, replies, deadlines, and the end with the parent.

Only the standard library."""
