"""Registration of the deployments with a Prefect API."""
