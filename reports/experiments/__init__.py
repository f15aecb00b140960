"""Report sections of each kind of experiment: a figure, a sentence, a table."""
