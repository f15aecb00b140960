"""The state of one run: missing measurements, jobs, records, retries. Imports no Prefect."""
