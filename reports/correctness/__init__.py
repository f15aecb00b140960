"""The correctness section: reference answers, noise, and the verdict."""
