"""A folder with a small task that trains on a CPU, to be changed into one's own."""
