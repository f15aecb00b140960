"""The points of an experiment, kind by kind, and the cells that they measure."""
