"""Memory model: bytes on the fullest rank in training and inference, by purpose."""
