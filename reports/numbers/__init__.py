"""What a handful of repeats can say: intervals, ratios, drift, steady state, when to stop. Arrays in, values out."""
