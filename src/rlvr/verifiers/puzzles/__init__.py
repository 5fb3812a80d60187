"""Puzzles whose answers are checked by their rules: arithmetic games, logic grids, reasoning-gym."""
