"""Places in images and videos: boxes, points in regions, intervals of time."""
