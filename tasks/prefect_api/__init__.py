"""Everything that talks to the Prefect API: cancellation and credentials."""
