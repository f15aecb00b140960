"""Bytes: what training and inference hold, on the fullest rank, by what for."""
