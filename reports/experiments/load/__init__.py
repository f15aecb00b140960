"""Load experiments: points judged, what they say in words, and which server to run."""
