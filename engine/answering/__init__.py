"""A server of encoders (embeddings) and encoder-decoders (completions); decoders have `engine.serving`."""
