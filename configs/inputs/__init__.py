"""Files that a study reads: prompts and training examples."""
