"""Manifests for containers: Dockerfile, Compose, Kubernetes (kustomize), Apptainer. Plain files."""
