"""What every package uses: seeds, schedules, waits, signals, processes, and configuration trees."""
