"""Statistics of few repeats: intervals, ratios, drift, steady state, stopping rules. Pure functions of arrays."""
