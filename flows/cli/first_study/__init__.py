"""`rankwise init` and `rankwise schema`: a first study file, and a JSON schema for editors."""
