"""What a checkpoint's `config.json` says, for every family that the engine computes; pure data, no torch."""
