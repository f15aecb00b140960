"""Which configuration: enumerated, predicted, ranked, and written down for the launchers."""
