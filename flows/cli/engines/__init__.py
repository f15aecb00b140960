"""`rankwise engine`: environments of other projects' servers."""
