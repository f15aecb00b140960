"""Traffic against an inference server: arrivals, lengths, limits, the job of a generator and its raw samples."""
