"""What runs on the ranks. Parts are exported lazily: importing one never imports torch by accident."""
