"""Commands for clusters: lab, bundle, push."""
