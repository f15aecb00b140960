"""Programs that run in a separate process: calibration, conversion, export, tokenizer training."""
