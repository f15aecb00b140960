"""Model configurations parsed from `config.json`, and the weight layouts of all supported families."""
