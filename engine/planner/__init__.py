"""What will fit, how fast, at what price, in which layout: predicted without running. Never imports torch."""
