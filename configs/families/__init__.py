"""What a `config.json` says of a model, and which tensors its checkpoint holds: data of every layer, without torch."""
