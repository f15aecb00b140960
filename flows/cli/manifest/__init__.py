"""`rankwise manifest`: files for Docker, Compose, Kubernetes and Apptainer."""
