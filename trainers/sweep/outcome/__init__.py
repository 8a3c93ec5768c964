"""What a sweep leaves in its folder: winner, front, importance, pictures, page."""
