"""What each kind of experiment answers: a figure, a sentence, a table."""
