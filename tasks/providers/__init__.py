"""Talks to the outside: model hubs and clouds. Imports no Prefect."""
