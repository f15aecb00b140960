"""Commands for Prefect: team, deploy-flows."""
