"""Read a run folder of up to a hundred thousand records into cells with readings."""
