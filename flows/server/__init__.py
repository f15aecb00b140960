"""The local Prefect server and the settings of Prefect."""
