"""A run folder becomes cells with their readings, ten or a hundred thousand records."""
