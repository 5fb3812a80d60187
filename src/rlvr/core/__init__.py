"""Basics of every package: seeds, schedules, waits, signals, processes, and configuration trees."""
