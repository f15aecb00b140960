"""What was predicted beforehand, held against what was measured; and how scaling goes on beyond it."""
